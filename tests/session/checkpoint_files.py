"""Spark's own manager of checkpoint files, over our local files or over Hadoop's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semel.decisions.hadoop import _first_class, hadoop_conf, java_errors_as_os_errors, jvm_of
from semel.session.local_files import CLASS, HADOOPS_OWN, KEY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAYS = {"ours": CLASS, "hadoop": HADOOPS_OWN}


class CheckpointFiles:
    """What Spark does with the files of a checkpoint, by the class that it does it with."""

    def __init__(self, spark: SparkSession, root: str, settings: Mapping[str, str]) -> None:
        self.root = root.rstrip("/")
        self.jvm = jvm_of(spark)
        self._conf = conf = hadoop_conf(spark)
        for name, value in settings.items():
            conf.set(name, value)
        self.manager = _first_class(self.jvm).create(self.path(""), conf)

    def path(self, name: str) -> Any:
        return self.jvm.org.apache.hadoop.fs.Path(f"{self.root}/{name}" if name else f"{self.root}/")

    def begin(self, name: str, content: bytes, *, overwrite: bool = False) -> Any:
        """A stream whose closing gives the file its name."""
        with java_errors_as_os_errors("create", name):
            stream = self.manager.createAtomic(self.path(name), overwrite)
            stream.write(content)
            return stream

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> None:
        stream = self.begin(name, content, overwrite=overwrite)
        with java_errors_as_os_errors("name", name):
            stream.close()

    def read(self, name: str) -> bytes:
        """As Spark reads it, which compares no checksum; and by Hadoop's FileSystem, which does."""
        with java_errors_as_os_errors("read", name):
            content = self._all_of(self.manager.open(self.path(name)))
            if self._all_of(self.path(name).getFileSystem(self._conf).open(self.path(name))) != content:
                raise ValueError(f"{name} has two contents")
            return content

    def _all_of(self, stream: Any) -> bytes:
        try:
            return bytes(self.jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def mkdirs(self, name: str) -> None:
        with java_errors_as_os_errors("make", name):
            self.manager.mkdirs(self.path(name))

    def names(self, name: str) -> list[str]:
        with java_errors_as_os_errors("list", name):
            return sorted(str(found.getPath().getName()) for found in self.manager.list(self.path(name)))


def checkpoint_files(spark: SparkSession, root: str, way: str = "", **settings: str) -> CheckpointFiles:
    """By the way that is named, or as the session has it."""
    chosen = {KEY: WAYS[way]} if way else {}
    return CheckpointFiles(spark, root, {**chosen, **{k.replace("__", "."): v for k, v in settings.items()}})


def class_behind(files: CheckpointFiles) -> str:
    return str(files.manager.fc().getDefaultFileSystem().getClass().getName())
