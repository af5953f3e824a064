"""Records on a Hadoop file system, through the manager that Spark itself trusts with its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from semel.decisions.base import RecordStore, StoreUnanswered
from semel.errors import Refused
from semel.failpoints import failpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark 4.1 moved the class.
_MANAGERS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager",
    "org.apache.spark.sql.execution.streaming.CheckpointFileManager",
)
_MANAGER_SETTING = "spark.sql.streaming.checkpointFileManagerClass"


class HadoopStore(RecordStore):
    """A temporary file is written, synced and renamed to its name; the rename fails if the name exists.

    That is atomic where the file system renames so: `stores.py` knows which do. The temporary names begin with a dot.
    """

    def __init__(self, spark: SparkSession, root_uri: str) -> None:
        self.root = root_uri.rstrip("/")
        self._jvm = jvm_of(spark)
        self._manager = _checkpoint_manager(spark, self._jvm.org.apache.hadoop.fs.Path(f"{self.root}/"))

    def create(self, path: str, content: bytes) -> bool:
        # Spark leaves the temporary file of a lost race behind. Most races are lost long before: look first.
        if self.exists(path):
            return False
        stream = self._written(path, content)
        try:
            with java_errors_as_os_errors("create", self._where(path)):
                stream.close()
        except FileExistsError:
            return False
        except Exception as error:  # noqa: BLE001  a rename whose answer is lost may have happened, whatever the error is
            return self._ask_who_created(path, content, error)
        return True

    def replace(self, path: str, content: bytes) -> None:
        with java_errors_as_os_errors("replace", self._where(path)):
            self._written(path, content, overwrite=True).close()

    def read(self, path: str) -> bytes | None:
        try:
            with java_errors_as_os_errors("read", self._where(path)):
                stream = self._manager.open(self._path(path))
                try:
                    return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
                finally:
                    stream.close()
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        with java_errors_as_os_errors("look for", self._where(path)):
            return bool(self._manager.exists(self._path(path)))

    def list(self, folder: str) -> list[str]:
        return [name for name in self._names(folder, lambda found: found.isFile()) if not name.startswith(".")]

    def folders(self, folder: str) -> Sequence[str]:
        return self._names(folder, lambda found: found.isDirectory())

    def _names(self, folder: str, wanted: Callable[[Any], bool]) -> Sequence[str]:
        try:
            with java_errors_as_os_errors("list", self._where(folder)):
                return sorted(str(f.getPath().getName()) for f in self._manager.list(self._path(folder)) if wanted(f))
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        # The manager itself is silent about a file that is not there.
        with java_errors_as_os_errors("delete", self._where(path)):
            self._manager.delete(self._path(path))

    def describe(self) -> str:
        return self.root

    def _where(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._where(path))

    def _written(self, path: str, content: bytes, *, overwrite: bool = False) -> Any:
        """A stream whose whole content is on the disks of the data nodes; closing it gives the file its name."""
        with java_errors_as_os_errors("create", self._where(path)):
            target = self._path(path)
            self._manager.mkdirs(target.getParent())
            stream = self._manager.createAtomic(target, overwrite)
            try:
                stream.write(content)
                stream.hsync()
                failpoint("log.written")
            except BaseException:
                with suppress(Exception):
                    stream.cancel()
                raise
            return stream

    def _ask_who_created(self, path: str, content: bytes, error: Exception) -> bool:
        """After a close that failed, the record itself says whose it is: no two creators write the same bytes."""
        found = None
        # Unreadable, for whatever reason, is "not known"; the error that matters is the first one.
        with suppress(Exception):
            found = self.read(path)
        if found is None:
            # Absent now is not absent for ever: the rename may still be on its way to the server.
            raise StoreUnanswered(str(error)) from error
        return found == content


def jvm_of(spark: SparkSession) -> Any:
    """The Java side of a session."""
    return spark.sparkContext._gateway.jvm  # type: ignore[union-attr]  # a context that runs has a gateway


def hadoop_conf(spark: SparkSession) -> Any:
    """The Hadoop settings that Spark uses for this session's checkpoints, in a copy."""
    return spark._jsparkSession.sessionState().newHadoopConf()


def _checkpoint_manager(spark: SparkSession, root: Any) -> Any:
    """Spark's own manager, never one that the user set: of those we do not know what they overwrite."""
    settings = hadoop_conf(spark)
    settings.unset(_MANAGER_SETTING)
    manager = _first_class(jvm_of(spark)).create(root, settings)
    kind = str(manager.getClass().getSimpleName())
    # Where a scheme has no FileContext, Spark falls back to a manager that looks first and renames then.
    if kind != "FileContextBasedCheckpointFileManager":
        raise Refused(
            f"The decision log cannot live in {root.toString()}: Spark gave its {kind}, whose create-if-absent is not "
            "atomic, so a decision could be taken twice.",
            remedy="Put the checkpointLocation on a local disk, HDFS or Azure Data Lake (abfss).",
        )
    return manager


def _first_class(jvm: Any) -> Any:
    from py4j.java_gateway import JavaClass

    for name in _MANAGERS:
        found = jvm
        for part in name.split("."):
            found = getattr(found, part)
        # What is no class, py4j takes for a package.
        if isinstance(found, JavaClass):
            return found
    raise RuntimeError(f"this Spark has none of {', '.join(_MANAGERS)}")


@contextmanager
def java_errors_as_os_errors(verb: str, where: str) -> Iterator[None]:
    """Java's errors as Python's, with the one line that says what is wrong and without Java's stack."""
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        kinds = _class_names(error.java_exception)
        line = f"cannot {verb} {where}: {next(iter(str(error.java_exception.toString()).splitlines()), kinds[0])}"
        if "java.io.FileNotFoundException" in kinds:
            raise FileNotFoundError(line) from error
        if "org.apache.hadoop.fs.FileAlreadyExistsException" in kinds:
            raise FileExistsError(line) from error
        raise OSError(line) from error
    except Py4JError as error:
        raise OSError(f"cannot {verb} {where}: the JVM does not answer: {error}") from error


def _class_names(java_object: Any) -> list[str]:
    """The class of a Java object and those it is derived from."""
    names, kind = [], java_object.getClass()
    while kind is not None:
        names.append(str(kind.getName()))
        kind = kind.getSuperclass()
    return names
