"""What a sink is made of.

    Sink          what the user writes: frozen, picklable, validated when made; holds no connection
    Writer        on an executor: turns Arrow batches into one staged part, durable and invisible
    StagedPart    what a writer hands to the driver; not yet a promise of the sink
    Participant   on the driver: prepares staged parts into committables, commits, aborts, recovers
    Remains       what a participant finds of ours in the store at start
    Evidence      what a sink can prove of batches, for audits

One contract suite (semel.testing.contract) covers every sink.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from semel.errors import ConfigError, Fenced, InDoubt
from semel.ids import Attempt, Branch, Incarnation, PipelineId, sink_name, to_sink_name
from semel.protocol.events import Committable, Outcome
from semel.protocol.plans import is_of_another_plan
from semel.protocol.refusals import AGAIN, NOW, words

if TYPE_CHECKING:
    import pyarrow as pa
from semel.sinks.evidence import Evidence


@dataclass(frozen=True)
class Capabilities:
    """What a store can and cannot do; tests, doctor and the docs read these."""

    #: Prepared rows live in the store's own prepared transaction and not in a staging area of ours.
    native_prepare: bool = False
    #: Executors on other machines can write to it. Where they cannot, a start on a cluster is refused.
    remote_executors: bool = True
    #: Each task is committed for itself, so that a decided batch may be gone in part.
    commits_by_task: bool = False
    #: The store drops what is prepared after a while: it is prepared last and committed first.
    expires: bool = False
    #: The driver may write a small batch itself, by the writer of a task. Where it may not, tasks always do.
    driver_writes: bool = True


@dataclass(frozen=True)
class Context:
    """For whom a participant works. `marked` is off below exactly-once: no marker is written and none is asked for."""

    pipeline: PipelineId
    name: str
    incarnation: Incarnation
    marked: bool = True

    def refuse_if_older(self, newest: int, target: str) -> None:
        """Raise when a store knows a newer incarnation of this pipeline: this driver may write there no more."""
        if newest > self.incarnation:
            raise Fenced(f"Incarnation {self.incarnation} is older than {newest}, the newest one in {target}.")


@dataclass(frozen=True)
class StagedPart:
    """What one task staged for one sink. `payload` is the sink's own, plain JSON.

    `fingerprint` is the same for the same rows, under whatever number of the task. It is empty
    where it is not needed, or where Spark cannot tell it. `plan` is the digest of what Spark planned for the batch.
    """

    branch: Branch
    rows: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    plan: str = ""


@dataclass(frozen=True)
class Remains:
    """What the store holds of this pipeline at start.

    `branches` are staged or prepared and not committed. `newest_batch` is the newest marker. `namesakes` are the ids of
    other pipelines that left markers here under our name: most likely this one before its checkpoint was deleted.
    `others` are those that left some under other names, with the names: rows of both mix.
    """

    branches: tuple[Branch, ...] = ()
    newest_batch: int | None = None
    namesakes: tuple[PipelineId, ...] = ()
    others: tuple[tuple[str, PipelineId], ...] = ()

    @classmethod
    def of(
        cls,
        branches: Iterable[Branch],
        newest_batch: int | None,
        writers: Iterable[tuple[str, PipelineId]],
        context: Context,
    ) -> Remains:
        """`writers` are all that have markers here, each by name and id; they are told apart by whose they are."""
        strangers = sorted({(name, pipeline) for name, pipeline in writers if pipeline != context.pipeline})
        namesakes = {pipeline for name, pipeline in strangers if name == context.name}
        others = tuple((name, pipeline) for name, pipeline in strangers if pipeline not in namesakes)
        return cls(tuple(branches), newest_batch, tuple(sorted(namesakes)), others)


@dataclass(frozen=True)
class Sight:
    """The part of what is left in a store that the store shows at once. `missing` says why it may not be all of it.

    What is not in here may be there all the same.
    """

    branches: tuple[Branch, ...]
    missing: str = ""


_WHERE = re.compile(r" (?:at|in) ")

#: An error of a task that says this is told by the driver with the number, which tasks do not know.
NUMBER_OF_TASKS = "the number of tasks"


class Writer(ABC):
    """Lives in one task. Never shared, never pickled."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Stage some rows. Memory stays bounded by the batch, whatever the partition holds."""

    @abstractmethod
    def prepare(self) -> StagedPart:
        """Make what was written durable. From here on the part survives the death of this task."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written. Called when the task fails; never raises for what is already gone."""


class Participant(ABC):
    """Lives on the driver for one run of one pipeline, and answers for one sink."""

    @abstractmethod
    def fence(self) -> None:
        """Tell the store which incarnation is the newest. Raises Fenced when it knows a newer one."""

    def expect(self, attempt: Attempt) -> None:  # noqa: B027 - most have nothing to do so early
        """Tasks are about to stage rows of this attempt. What begins here ends with `prepare` or `abort`."""

    @abstractmethod
    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        """Promise: whatever can fail because of the rows fails here. An empty batch gives a committable, too."""

    @abstractmethod
    def commit(self, committable: Committable) -> Outcome:
        """Make it visible. Idempotent, and works from a fresh process with nothing but the committable.

        Raises SinkUnavailable when the store does not answer: that is no outcome, and the coordinator asks again.
        Raises InDoubt when a marker of the batch is not of the rows at hand; see `refuse_another_plan`. Any other error
        is one of a program, which does not mend itself. The call has as long as `semel.deadline` says; after that the
        coordinator does not wait for it any more, and only the marker tells what came of it.
        """

    @abstractmethod
    def abort(self, branches: Iterable[Branch]) -> None:
        """Drop what is staged or prepared under these names. Idempotent; harmless for names it does not know."""

    @abstractmethod
    def recover(self) -> Remains:
        """List what is left of this pipeline in this sink, and of no other."""

    def in_sight(self) -> Sight:
        """The branches that `recover` lists, but what would have to wait for a part of the store is left out.

        For whoever tidies up beside the batches, and comes again.
        """
        return Sight(self.recover().branches)

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. What was prepared stays prepared."""


@dataclass(frozen=True)
class Sink(ABC):
    """Base of all sinks.

    `name` tells sinks of one pipeline apart and must not change while the pipeline lives. `select` and `where` are SQL
    expressions over the columns of the DataFrame: the sink gets those columns and those rows.

    `starts` allows what is refused otherwise. "now": the sink begins at the present batch of a checkpoint that has done
    others before. "again": the sink gets a second time what this pipeline wrote into it under another checkpoint.
    "now, again" allows both.
    """

    kind: ClassVar[str]
    #: What tasks of this sink import besides semel, pyarrow, and crc32c where it commits by task.
    modules: ClassVar[tuple[str, ...]] = ()

    name: str = field(default="", kw_only=True)
    select: Sequence[str] = field(default=(), kw_only=True)
    where: str = field(default="", kw_only=True)
    starts: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not words(self.starts) <= {NOW, AGAIN}:
            raise ConfigError(
                f"A {self.kind} sink cannot have starts={self.starts!r}.",
                remedy=f"Use starts={NOW!r}, starts={AGAIN!r}, both with a comma between them, or leave it out.",
            )
        if isinstance(self.select, str):
            raise ConfigError(f"select of {self.kind} takes a list of expressions, not one text: {self.select!r}.")
        object.__setattr__(self, "select", tuple(self.select))
        try:
            object.__setattr__(self, "name", sink_name(self.name or to_sink_name(self.default_name())))
        except ValueError as error:
            raise ConfigError(f"A {self.kind} sink cannot have this name: {error}.") from None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def among(self, sinks: Sequence[Sink]) -> Sink:  # noqa: ARG002 - most sinks do not care
        """The sink as it is used in a pipeline of these sinks, itself included."""
        return self

    @abstractmethod
    def default_name(self) -> str:
        """The name when the user gave none: made of the target, so that it is the same at the next start."""

    @abstractmethod
    def describe(self) -> str:
        """The target for messages and records, without secrets."""

    def is_in(self, described: str) -> bool:
        """Whether `described`, from an older record, names what this sink writes to; the address may be another.

        Our descriptions say what first and where after that: "PostgreSQL table orders at db:5432".
        """
        mine, theirs = (_WHERE.split(text, 1)[0] for text in (self.describe(), described))
        return mine == theirs

    @abstractmethod
    def check(self, schema: pa.Schema) -> None:
        """Raise SchemaMismatch or ConfigError if rows of this schema cannot be written. Writes nothing."""

    def check_store(self, pipeline: PipelineId) -> None:  # noqa: B027 - most have nothing more to ask
        """Raise when the store cannot keep exactly-once for this pipeline. It may create what is semel's own there.

        Asked before the claim: a start that is refused fences nobody, and a driver that runs goes on.
        """

    @abstractmethod
    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        """A writer for one task. `durable` is off below exactly-once: nothing has to survive the batch.

        `plan` goes into the marker, where the task writes one.
        """

    @abstractmethod
    def participant(self, context: Context) -> Participant:
        """A participant for one run."""

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:  # noqa: ARG002 - a sink need not have any
        """What can be proven of these batches, which are over, and of younger ones as they are now. Changes nothing.

        It may be asked beside a running driver. Raises SinkUnavailable when the store does not answer.
        """
        return Evidence(why=f"{self.describe()} does not list its markers")


def refuse_another_plan(sink: Sink, batch: int, marker: str, plan: str) -> None:
    """Raise when a marker of this batch is of another plan than the rows at hand: it does not prove these."""
    if is_of_another_plan(marker, plan):
        raise InDoubt(
            f"Sink {sink.name} ({sink.describe()}) holds batch {batch} of another plan: another driver runs this "
            "pipeline on another copy of its checkpoint.",
            data_now=f"nothing of batch {batch} was decided or written here; the sink shows what the other one wrote",
            remedy="Stop the other driver and keep one of the two checkpoints. Rows that only the other one has read "
            "must be written by hand.",
        )


def committable_for(
    sink: str, attempt: Attempt, parts: Sequence[StagedPart], payload: Mapping[str, Any], key: str = ""
) -> Committable:
    """The committable that covers these parts. The key is the same at every attempt, so that a mend replaces it."""
    return Committable(
        sink=sink,
        key=key or sink,
        attempt=attempt,
        rows=sum(p.rows for p in parts),
        branches=tuple(sorted(str(p.branch) for p in parts)),
        payload=dict(payload),
        fingerprint=parts[0].fingerprint if len(parts) == 1 else "",
        plan=parts[0].plan if parts else "",
    )
