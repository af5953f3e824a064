"""What runs in the child processes of `semel verify`, and how the parent asks for it.

    python -m semel.verify.child probe FILE[:NAME] --answer PATH    build the pipeline and describe it; start nothing
    python -m semel.verify.child run FILE[:NAME] --checkpoint DIR   run it until it is stopped, told in JSON lines

The parent never builds a pipeline itself: Spark stays out of it. It imports the user's file for its workload alone,
whose functions make rows there (stage.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, SemelError
from semel.run import runner
from semel.run.happenings import Happening
from semel.run.loading import load_pipelines, split_target
from semel.run.runner import exit_code, told_as_config_error
from semel.run.session import SparkSettings, open_session
from semel.runtime.checks import check_sinks, check_sources
from semel.runtime.pipeline import CHECKPOINT, Pipeline, StreamWriter
from semel.runtime.staging import arrow_schema
from semel.sinks.base import Sink
from semel.sinks.kinds import kind_of
from semel.sources.plan import PlannedSource, planned_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PROBE_S_MAX = 300.0
STDERR_KEPT = 2000
#: Spark forgets the offsets of old batches after a hundred; the audit needs all of them.
KEEP_OFFSETS = {"spark.sql.streaming.minBatchesToRetain": "100000"}
#: Operators of a streaming plan after which a row of the output does not belong to one row of the input. Joins are
#: among them where both sides are streams.
STATEFUL = (
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "Distinct",
    "FlatMapGroupsInPandasWithState",
    "FlatMapGroupsWithState",
    "GlobalLimit",
    "TransformWithState",
    "TransformWithStateInPandas",
    "TransformWithStateInPySpark",
)


@dataclass(frozen=True)
class Probe:
    """What the parent must know of a pipeline. Sinks are as it uses them; `columns` has what each of them gets."""

    pipeline: str
    guarantee: str
    sinks: tuple[Sink, ...]
    sources: tuple[PlannedSource, ...]
    columns: Mapping[str, tuple[str, ...]]
    #: For a sink of records: the fields of the JSON in its values, where the plan says so.
    fields: Mapping[str, tuple[str, ...]]
    is_stateful: bool


# What the parent does -------------------------------------------------------------------------------------------------


def probe(
    target: str, variables: Mapping[str, str], conf: Mapping[str, str], folder: Path, master: str = "local[1]"
) -> Probe:
    """Describe the pipeline of `FILE[:NAME]`. Raises what is wrong with it; nothing of the user's was touched then."""
    answer = folder / "probe.pickle"
    answer.unlink(missing_ok=True)
    command = [*_command("probe", target, conf, master), "--answer", str(answer)]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, env=_environment(variables), capture_output=True, text=True, timeout=PROBE_S_MAX, check=False
        )
        found = pickle.loads(answer.read_bytes())  # noqa: S301 - our own child wrote it, for us alone
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{target} was not built within {PROBE_S_MAX:.0f} s.") from None
    except FileNotFoundError:
        raise ConfigError(f"{target} cannot be described: {done.stderr.strip()[-STDERR_KEPT:]}") from None
    except Exception as error:
        raise ConfigError(
            f"The sinks of {target} cannot leave its process: {error}",
            remedy="Define sinks of your own in a module, not in the pipeline file.",
        ) from error
    finally:
        answer.unlink(missing_ok=True)
    if isinstance(found, SemelError):
        raise found
    if not isinstance(found, Probe):
        raise ConfigError(f"{target} was described as {type(found).__name__}.")
    return found


def run_command(target: str, checkpoint: Path, conf: Mapping[str, str], master: str) -> list[str]:
    """The command line of one life."""
    return [*_command("run", target, conf, master), "--checkpoint", str(checkpoint)]


def run_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """What a life needs in its environment beside ours."""
    return {"PYSPARK_PYTHON": sys.executable, **variables}


def _command(verb: str, target: str, conf: Mapping[str, str], master: str) -> list[str]:
    settings = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    return [sys.executable, "-m", "semel.verify.child", verb, target, "--master", master, *settings]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **run_variables(variables)}


# Probe ----------------------------------------------------------------------------------------------------------------


def describe(target: str, settings: SparkSettings) -> Probe:
    pipelines = load_pipelines(target)
    if len(pipelines) > 1:
        raise ConfigError(
            f"{target} has more than one pipeline: {', '.join(p.name for p in pipelines)}.",
            remedy=f"Name the one to verify: {target}:{pipelines[0].name}",
        )
    spark = open_session(settings, pipelines)
    path = split_target(target)[0]
    with told_as_config_error(f"Pipeline {pipelines[0].name} of {path} cannot be built", path):
        return describe_writer(pipelines[0], pipelines[0](spark))


def describe_writer(pipeline: Pipeline, writer: StreamWriter) -> Probe:
    """All that a start would check is checked here, where nothing has been touched yet."""
    check_sinks(writer.sinks)
    plan = writer.df._jdf.queryExecution().analyzed()
    check_sources(plan, writer.guarantee)
    sinks = tuple(sink.among(writer.sinks) for sink in writer.sinks)
    return Probe(
        pipeline=pipeline.name,
        guarantee=writer.guarantee,
        sinks=sinks,
        sources=tuple(planned_sources(plan)),
        columns={sink.name: _columns(writer.df, sink) for sink in sinks},
        fields={sink.name: found for sink in sinks if (found := _fields(writer.df, sink))},
        is_stateful=any(_keeps_state(node) for node in _nodes(plan)),
    )


def _columns(df: DataFrame, sink: Sink) -> tuple[str, ...]:
    schema = arrow_schema(df, sink)
    sink.check(schema)
    return tuple(schema.names)


def _fields(df: DataFrame, sink: Sink) -> tuple[str, ...]:
    return json_fields(df, sink) if kind_of(sink).takes_records else ()


def json_fields(df: DataFrame, sink: Sink) -> tuple[str, ...]:
    """The fields of the value that a sink gets, if the plan makes it by to_json of a struct; else none."""
    plan = (df.selectExpr(*sink.select) if sink.select else df)._jdf.queryExecution().analyzed()
    made: dict[int, Any] = {}
    for node in _nodes(plan):
        if str(node.nodeName()) == "Project":
            made |= {e.exprId().id(): e.child() for e in _items(node.projectList()) if _class(e) == "Alias"}
    found = [e for e in _items(plan.output()) if e.name() == "value"]
    at = made.get(found[0].exprId().id()) if found else None
    # What it was called on the way, and the bytes that were made of it, are the same text.
    while at is not None and _class(at) in ("AttributeReference", "Cast"):
        at = made.get(at.exprId().id()) if _class(at) == "AttributeReference" else at.child()
    if at is None or _class(at) != "StructsToJson" or _class(at.child().dataType()) != "StructType":
        return ()
    return tuple(at.child().dataType().fieldNames())


def _class(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _nodes(plan: Any) -> Iterator[Any]:
    """Every operator of a JVM LogicalPlan."""
    yield plan
    children = plan.children()
    for index in range(children.size()):
        yield from _nodes(children.apply(index))


def _keeps_state(node: Any) -> bool:
    name = str(node.nodeName())
    if name == "Join":
        return bool(node.left().isStreaming() and node.right().isStreaming())
    return name in STATEFUL and bool(node.isStreaming())


def _answer(path: Path, found: object) -> None:
    """For our parent alone: sinks hold passwords."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pickle.dump(found, file)


# Run ------------------------------------------------------------------------------------------------------------------


def adapted(writer: StreamWriter, checkpoint: str) -> StreamWriter:
    """The same pipeline with the checkpoint of this run, and without a trigger that would end it by itself."""
    ends = any(writer.trigger_.get(name) for name in ("availableNow", "once"))
    return replace(writer.option(CHECKPOINT, checkpoint), trigger_={} if ends else writer.trigger_)


class Teller:
    """One JSON line per event. Pipelines run in threads of their own, so one event is told after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hear(self, happening: Happening) -> None:
        self.tell({name: value for name, value in asdict(happening).items() if value not in (None, "")})

    def failed(self, error: BaseException) -> None:
        """The last word: what `Happening` tells of a failure is not which kind of error it is."""
        self.tell({"event": "error", "kind": type(error).__name__, "error": str(error)})

    def tell(self, event: Mapping[str, Any]) -> None:
        with self._lock, suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()


def run(target: str, settings: SparkSettings, checkpoint: str) -> int:
    teller = Teller()
    try:
        runner.run(target, settings, teller.hear, lambda writer: adapted(writer, checkpoint))
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is to be told
        teller.failed(error)
        # Its log is the only place for an error that is not one of ours.
        sys.stderr.write(f"{error}\n" if isinstance(error, SemelError) else traceback.format_exc())
        return exit_code(error)
    return 0


# The command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.verify.child")
    parser.add_argument("verb", choices=("probe", "run"))
    parser.add_argument("target")
    parser.add_argument("--answer", type=Path)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--conf", action="append", default=[])
    parser.add_argument("--master", default="local[2]")
    chosen = parser.parse_args(arguments)
    settings = SparkSettings(
        master=chosen.master,
        conf={**dict(item.split("=", 1) for item in chosen.conf), **KEEP_OFFSETS},
        app=f"semel verify {split_target(chosen.target)[0].stem}",
        folder=str(split_target(chosen.target)[0].resolve().parent),
    )
    if chosen.verb == "run":
        return run(chosen.target, settings, chosen.checkpoint)
    try:
        _answer(chosen.answer, describe(chosen.target, settings))
    except SemelError as error:
        _answer(chosen.answer, error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    # Under its own name: what is pickled in here is looked for there.
    code = importlib.import_module("semel.verify.child").main()
    # A driver that ends must not wait for threads of a cluster that was killed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
