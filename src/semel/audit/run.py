"""Audit the pipelines of a file. Spark is started to build their streams and to read their checkpoints, for no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from semel.audit.compare import compare
from semel.audit.facts import Facts
from semel.audit.gather import gather
from semel.audit.results import Audit
from semel.errors import CheckpointError, ConfigError, SemelError
from semel.run.loading import load_pipelines, split_target
from semel.run.runner import told_as_config_error
from semel.run.session import SparkSettings, open_session
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.checks import check_sinks
from semel.runtime.pipeline import Pipeline, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def audit(target: str, settings: SparkSettings) -> Iterator[Audit]:
    """One audit for each pipeline of `FILE[:NAME]`. Starts no query and claims no pipeline."""
    pipelines = load_pipelines(target)
    path = split_target(target)[0]
    with _session(settings, pipelines) as spark:
        for pipeline in pipelines:
            yield audit_one(pipeline, spark, path)


def audit_one(pipeline: Pipeline, spark: SparkSession, path: Path) -> Audit:
    """What is wrong with the file or the checkpoint is raised. A source that is away leaves everything unknown."""
    try:
        return audit_writer(build(pipeline, spark, path))
    except (ConfigError, CheckpointError):
        raise
    except SemelError as error:
        why = f"the pipeline cannot be built: {error.what.rstrip('.')}"
        return compare(Facts(pipeline.name, "", "", checkpoint_error=why))


def build(pipeline: Pipeline, spark: SparkSession, path: Path) -> StreamWriter:
    with told_as_config_error(f"Pipeline {pipeline.name} of {path} cannot be built", path):
        return pipeline(spark)


def audit_writer(writer: StreamWriter) -> Audit:
    """Audit what a writer would run, or is running."""
    check_sinks(writer.sinks)
    checkpoint = Checkpoint(writer.df.sparkSession, writer.checkpoint)
    sinks = [sink.among(writer.sinks) for sink in writer.sinks]
    return compare(gather(writer.name, writer.guarantee, checkpoint, sinks))


@contextmanager
def _session(settings: SparkSettings, pipelines: tuple[Pipeline, ...]) -> Iterator[SparkSession]:
    spark = open_session(settings, pipelines)
    try:
        yield spark
    finally:
        with suppress(Exception):  # what was found is told whether or not Spark ends well
            spark.stop()


def exit_code(audits: Iterable[Audit]) -> int:
    """0 when every verdict is true, 1 when one is false, else 3."""
    verdicts = {audit.verdict for audit in audits}
    if False in verdicts:
        return 1
    return 0 if verdicts == {True} else 3
