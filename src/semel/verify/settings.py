"""What a run is asked to do, checked before anything is started."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from semel.dev.servers import KAFKA_NAME
from semel.dev.servers import KINDS as SERVERS
from semel.errors import ConfigError, MissingExtra
from semel.runtime.checks import check_guarantee
from semel.sinks.kinds import SinkKind, kinds, refused
from semel.verify.plan import KINDS, refuse_kinds_that_kill_nobody

MASTER = "local[2]"
#: Settings whose values Spark hides, too (spark.redaction.regex).
SECRET = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """`target` is a pipeline file; without one the built-in pipeline writes to `sinks`.

    `servers` are started for this run, `breakable` are servers of `semel dev` that may be killed, too. `topics` are
    made on the Kafka that was started. `rows` and `kills` are what the run is to reach at least. `identity` overrules
    that of the workload.
    """

    seed: int
    target: str = ""
    sinks: Sequence[str] = ()
    servers: Sequence[str] = ()
    breakable: Sequence[str] = ()
    topics: Sequence[str] = ()
    kills: int = 20
    rows: int = 20_000
    rows_per_batch: int = 500
    faults: Sequence[str] = ()
    identity: str = ""
    guarantee: str = ""
    master: str = MASTER
    conf: Mapping[str, str] = field(default_factory=dict)
    output: Path = Path("verify-output")
    keep: bool = False

    def __post_init__(self) -> None:
        if bool(self.target) == bool(self.sinks):
            raise ConfigError(
                "What is to be verified?",
                remedy="Name a pipeline file (semel verify FILE.py) or sinks of the built-in one "
                "(semel verify --sinks kafka,postgres), not both.",
            )
        if self.guarantee and self.target:
            raise ConfigError(
                "The guarantee of a pipeline is in its file.", remedy="Leave --guarantee out, or use it with --sinks."
            )
        if self.guarantee:
            check_guarantee(self.guarantee)
        self._check_sinks()
        _refuse_unknown("server that can be started", self.servers, SERVERS)
        _refuse_unknown("kind of fault", self.faults, KINDS)
        refuse_kinds_that_kill_nobody(self.faults, self.kills)
        self._check_breakable()
        if self.topics and KAFKA_NAME not in self.servers:
            raise ConfigError(
                "Topics are made only on a Kafka that this run starts.",
                remedy="Add --with kafka, or leave --topics out.",
            )
        if self.rows < 0 or self.kills < 0 or self.rows_per_batch < 1:
            raise ConfigError("--rows, --kills and --rows-per-batch cannot be negative.", remedy="Use larger numbers.")
        if importlib.util.find_spec("pyspark") is None:
            raise MissingExtra("To verify a pipeline needs PySpark, which is not installed.", extra="spark")

    def _check_breakable(self) -> None:
        """A server has one name in the plan, so it is either the run's own or somebody else's."""
        both = [name for name in self.breakable if name in self.all_servers]
        if both:
            raise ConfigError(
                f"{' and '.join(both)} is started for this run, and cannot be that of `semel dev` as well.",
                remedy=f"Leave --break {','.join(both)} out: what this run starts is broken anyway.",
            )

    def _check_sinks(self) -> None:
        if not self.sinks:
            return
        names, known = [sink.partition(":")[0] for sink in self.sinks], built_in()
        _refuse_broken([name for name in names if name not in known])
        _refuse_unknown("sink of the built-in pipeline", names, known)
        if len(set(names)) < len(names):
            raise ConfigError(f"A sink is named twice: {', '.join(self.sinks)}.", remedy="Name each once.")
        for name, colon, mode in (sink.partition(":") for sink in self.sinks):
            _refuse_unknown(f"server for the sink {name}", filter(None, [known[name].server]), SERVERS)
            if colon and not known[name].modes:
                raise ConfigError(f"The sink {name} has no modes.", remedy=f"Name it without one: {name}.")
            if colon:
                _refuse_unknown(f"mode of {name}", [mode], known[name].modes)

    @property
    def all_servers(self) -> tuple[str, ...]:
        """Those that are started: asked for, or needed by the built-in pipeline."""
        needed = [built_in()[sink.partition(":")[0]].server for sink in self.sinks]
        return tuple(name for name in SERVERS if name in (*self.servers, *needed))

    @property
    def replay(self) -> str:
        """The command that plays the same plan again, for a shell. Secrets are not in it."""
        lists = {"sinks": self.sinks, "with": self.servers, "topics": self.topics, "break": self.breakable}
        lists["faults"] = self.faults
        options = {name: ",".join(values) for name, values in lists.items()}
        options |= {"id": self.identity, "guarantee": self.guarantee}
        options["master"] = self.master if self.master != MASTER else ""
        words = [part for name, value in options.items() if value for part in (f"--{name}", value)]
        for key, value in self.conf.items():
            words += ["--conf", f"{key}={'...' if SECRET.search(key) else value}"]
        numbers = {"seed": self.seed, "kills": self.kills, "rows": self.rows, "rows-per-batch": self.rows_per_batch}
        words += [part for name, number in numbers.items() for part in (f"--{name}", str(number))]
        return shlex.join(["semel", "verify", *filter(None, [self.target]), *words])


def built_in() -> dict[str, SinkKind]:
    """The sinks that the built-in pipeline can have, by what they are called there."""
    return {kind.called or kind.name: kind for kind in kinds().values() if kind.reader and kind.example}


def _refuse_broken(names: Sequence[str]) -> None:
    """Kinds of other packages that are there, and give no sink."""
    for name in names:
        if name in refused():
            raise ConfigError(
                f"The sink {name} cannot be used: {refused()[name]}.",
                remedy="Mend the package that brings it, or install it anew.",
            )


def _refuse_unknown(what: str, names: Iterable[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"There is no {what} named {', '.join(unknown)}.", remedy=f"Choose among {', '.join(known)}.")
