"""All that a run needs, set up and checked before the pipeline gets its first row."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from semel.demo.warmup import spark_conf
from semel.dev.jars import Say, connector_jars
from semel.dev.servers import KAFKA_NAME
from semel.errors import ConfigError
from semel.run.loading import import_file, split_target
from semel.session.local_files import MASTER, with_local_files
from semel.sinks.base import Sink
from semel.sinks.kinds import kind_of
from semel.verify.child import Probe, probe
from semel.verify.classes import archive_of
from semel.verify.disk import Disk, ForgetfulDisk
from semel.verify.feeders import Feeder, open_feeder
from semel.verify.plan import kinds_possible
from semel.verify.readers import Reader, open_reader
from semel.verify.servers import Server, dev_server, start_servers
from semel.verify.settings import Settings
from semel.verify.workload import Workload, find_workload

PIPELINES = Path(__file__).with_name("pipelines.py")
TOPICS = ("verify_in", "verify_out")
PARTITIONS = 2
CHECKPOINT_MB = 512


@dataclass(frozen=True)
class Stage:
    """Where the pipeline plays. `conf` and `variables` are those of every life."""

    settings: Settings
    work: Path
    target: str
    variables: Mapping[str, str]
    conf: Mapping[str, str]
    servers: Mapping[str, Server]
    #: The kinds of faults that the pipeline will suffer.
    kinds: Sequence[str]
    probe: Probe
    workload: Workload
    feeder: Feeder
    readers: Sequence[Reader]
    disk: Disk
    say: Say = field(repr=False)

    @property
    def checkpoint(self) -> Path:
        return self.disk.folder

    @property
    def logs(self) -> Path:
        """What each life says on stderr."""
        return self.work / "logs"

    @property
    def archive(self) -> Path:
        return archive_of(self.conf)


def set_up(stack: ExitStack, settings: Settings, work: Path, say: Say) -> Stage:
    """Start servers, look at the pipeline, and refuse what cannot be verified. Everything ends with the stack."""
    target = settings.target or str(PIPELINES)
    file, _ = split_target(target)
    if not file.is_file():
        raise ConfigError(f"There is no pipeline file {file}.", remedy="Name a Python file, or sinks: --sinks kafka.")
    if settings.all_servers:
        say(f"starting {', '.join(settings.all_servers)}")
    servers = dict(stack.enter_context(start_servers(settings.all_servers, work, say)))
    servers |= {name: dev_server(name, say) for name in settings.breakable}
    variables = _variables(settings, work, servers)
    conf = _conf(settings, say)
    (work / "logs").mkdir()
    if KAFKA_NAME in settings.all_servers:
        _make_topics(variables, TOPICS if settings.sinks else settings.topics)
    say("looking at the pipeline")
    found = probe(target, variables, {**spark_conf(archive_of(conf)), **conf}, work, master=settings.master)
    kinds = kinds_possible(found.guarantee, settings.master, tuple(servers), proxied(servers), wanted=settings.faults)
    workload = _workload(settings, target, found, variables)
    feeder = open_feeder(found.sources, workload, settings.rows_per_batch)
    stack.callback(feeder.close)
    marked = found.guarantee == "exactly-once"
    readers = [open_reader(sink, workload, feeder.number_of, marked=marked) for sink in found.sinks]
    _refuse_what_cannot_be_compared(settings, found, workload, feeder, readers)
    disk = ForgetfulDisk(work / "checkpoint") if "power" in kinds else Disk(work / "checkpoint", CHECKPOINT_MB)
    stack.callback(disk.close)
    return Stage(
        settings, work, target, variables, conf, servers, kinds, found, workload, feeder, readers, disk, say=say
    )


def nameless(sink: Sink, workload: Workload, why: str, data_now: str = "") -> ConfigError:
    """Nobody can tell which row of the input a row of this sink is."""
    how = "Let it through to the sink"
    if kind_of(sink).takes_records:
        how = "Put it into the JSON of the value, or make it the key or the whole value"
    return ConfigError(
        f"Rows of sink {sink.name} cannot be told apart: {why}.",
        data_now=data_now,
        remedy=f"{how}; or name another one that is different in every row: --id COLUMN, or "
        f'@semel.workload(identity="COLUMN") in the pipeline file. Now it is {workload.identity!r}.',
    )


def proxied(servers: Mapping[str, Server]) -> tuple[str, ...]:
    """Those whose network is ours."""
    return tuple(name for name, server in servers.items() if server.proxy)


def _variables(settings: Settings, work: Path, servers: Mapping[str, Server]) -> dict[str, str]:
    """What a pipeline file may read to find its way; a file that does not look gets what it has in it."""
    made = {
        "SEMEL_VERIFY_FOLDER": str(work),
        "SEMEL_VERIFY_ROWS_PER_BATCH": str(settings.rows_per_batch),
        "PYSPARK_PYTHON": sys.executable,
    }
    # A file source wants its folder to be there.
    (work / "in").mkdir()
    if settings.sinks:
        made["SEMEL_VERIFY_SINKS"] = ",".join(settings.sinks)
        made["SEMEL_VERIFY_GUARANTEE"] = settings.guarantee or "exactly-once"
    for server in servers.values():
        made |= server.variables
    return made


def _conf(settings: Settings, say: Say) -> dict[str, str]:
    """The built-in pipeline brings its connector; a user's file names its own packages, and maybe a class path."""
    if not settings.sinks:
        return dict(settings.conf)
    brought = {}
    if KAFKA_NAME in settings.all_servers:
        jars = os.pathsep.join(map(str, connector_jars(say=say)))
        brought = {"spark.driver.extraClassPath": jars, "spark.executor.extraClassPath": jars}
    # A life would do so itself; here it is said once where that cannot be.
    return with_local_files({MASTER: settings.master, **brought, **settings.conf}, say=say)


def _make_topics(variables: Mapping[str, str], topics: Sequence[str]) -> None:
    """Spark's source and semel's sink want them to be there before they start."""
    from semel.verify.kafka_feeder import create_topics

    create_topics({"bootstrap.servers": variables["SEMEL_KAFKA_SERVERS"]}, topics, PARTITIONS)


def _workload(settings: Settings, target: str, found: Probe, variables: Mapping[str, str]) -> Workload:
    """The file is read in this process too, with the variables that the pipeline gets."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        workload = find_workload(import_file(split_target(target)[0]), found.pipeline)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return replace(workload, identity=settings.identity) if settings.identity else workload


def _refuse_what_cannot_be_compared(
    settings: Settings, found: Probe, workload: Workload, feeder: Feeder, readers: Sequence[Reader]
) -> None:
    """Every sink must show which row is which, and be empty; so must the source."""
    for sink in found.sinks:
        columns = found.columns[sink.name]
        if not kind_of(sink).takes_records and workload.identity not in columns:
            raise nameless(sink, workload, f"it has no column {workload.identity!r}, only {', '.join(columns)}")
        fields = found.fields.get(sink.name, (workload.identity,))
        # Where there is a key, it may be the identity; the first rows will show.
        if workload.identity not in fields and "key" not in columns:
            raise nameless(sink, workload, f"its values have no field {workload.identity!r}, only {', '.join(fields)}")
    feeder.check_rows(settings.rows_per_batch)
    feeder.check_empty()
    for reader in readers:
        reader.check_ready()
