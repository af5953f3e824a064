"""Which store keeps the records of a location."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.decisions.base import RecordStore
from semel.decisions.files import FileStore
from semel.decisions.hadoop import HadoopStore, hadoop_conf, java_errors_as_os_errors, jvm_of
from semel.errors import CheckpointUnusable, Refused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Here a rename never replaces what is there, and the server itself sees to that: the name node (rename2) and Azure's
# hierarchical store (If-None-Match). Not in the list, on purpose: S3 and Google Storage copy and overwrite, and so does
# wasb (AzureNativeFileSystemStore.rename).
ATOMIC_SCHEMES = frozenset({"hdfs", "abfs", "abfss"})
_LOCAL = "file"
MOUNTS = "viewfs"


def open_store(spark: SparkSession, location: str) -> RecordStore:
    """The store for a folder, given as a path or a URI as Spark itself reads it. Refuses what cannot decide safely."""
    path = jvm_of(spark).org.apache.hadoop.fs.Path(location)
    scheme = path.toUri().getScheme() or _default_scheme(spark)
    if scheme not in ATOMIC_SCHEMES | {_LOCAL, MOUNTS}:
        raise _refused(location, scheme)
    try:
        with java_errors_as_os_errors("open", location):
            return _open(spark, location, path, scheme)
    except OSError as error:
        raise CheckpointUnusable(f"The decision log cannot be opened: {error}.") from error


def _open(spark: SparkSession, location: str, path: Any, scheme: str) -> RecordStore:
    file_system = path.getFileSystem(hadoop_conf(spark))
    qualified = file_system.makeQualified(path)
    if scheme == _LOCAL:
        # Never through Hadoop: its local rename looks whether the name exists and then renames, which is two steps,
        # and two drivers could take both. FileStore links, which is one.
        return FileStore(qualified.toUri().getPath())
    behind = str(path_behind(file_system, qualified).toUri().getScheme()) if scheme == MOUNTS else scheme
    if behind not in ATOMIC_SCHEMES:
        raise _refused(location, behind)
    return HadoopStore(spark, qualified.toString())


def _default_scheme(spark: SparkSession) -> str:
    """Where a path without a scheme leads: `fs.defaultFS`."""
    return str(jvm_of(spark).org.apache.hadoop.fs.FileSystem.getDefaultUri(hadoop_conf(spark)).getScheme())


def path_behind(file_system: Any, path: Any) -> Any:
    """Where a mount point leads to. Only what exists can be resolved, so the nearest folder that does is."""
    while path.getParent() is not None and not file_system.exists(path):
        path = path.getParent()
    return file_system.resolvePath(path)


def _refused(location: str, scheme: str) -> Refused:
    return Refused(
        f"The decision log cannot live in {location}: {scheme} has no atomic create-if-absent rename through Spark's "
        "checkpoint manager, so a decision could be taken twice.",
        remedy="Put the checkpointLocation on a local disk, HDFS or Azure Data Lake (abfss).",
    )
