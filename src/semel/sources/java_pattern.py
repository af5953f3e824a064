"""Patterns of topics. Spark reads them as Java does, so what Python cannot read is not wrong for that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def matcher(pattern: str) -> Callable[[str], bool]:
    """Says whether a whole name matches. Raises ValueError for what neither Python can read nor the Java that runs."""
    try:
        read = re.compile(pattern)
    except re.error as error:
        found = _read_by_java(pattern)
        if found is None:
            raise ValueError(str(error)) from None
        return lambda name: bool(found.matcher(name).matches())
    return lambda name: read.fullmatch(name) is not None


def _read_by_java(pattern: str) -> Any:
    """A java.util.regex.Pattern; None where Java cannot read it, or Spark has not started one."""
    try:
        from py4j.protocol import Py4JJavaError
        from pyspark import SparkContext
        from pyspark.errors import PySparkException
    except ImportError:
        return None
    if SparkContext._active_spark_context is None:
        return None
    jvm: Any = SparkContext._active_spark_context._jvm
    try:
        return jvm.java.util.regex.Pattern.compile(pattern)
    except (Py4JJavaError, PySparkException):
        # A session turns some of Java's exceptions into its own.
        return None
