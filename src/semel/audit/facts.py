"""What was read of a pipeline, as data: all that the comparison knows. Nothing in here does anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from semel.protocol.events import Journal
from semel.sinks.evidence import Evidence

EXACTLY_ONCE = "exactly-once"


@dataclass(frozen=True)
class Range:
    """What a batch reads. `rows_max` is an upper bound, `files` a number of files; None where nobody can say.

    `wrong` says that Spark's offsets contradict each other.
    """

    rows_max: int | None = None
    files: int | None = None
    wrong: str = ""

    def __str__(self) -> str:
        rows = "" if self.rows_max is None else f"≤ {self.rows_max:,} rows"
        files = "" if self.files is None else f"{self.files:,} file{'' if self.files == 1 else 's'}"
        return ", ".join(filter(None, (rows, files))) or "?"


@dataclass(frozen=True)
class BatchFacts:
    """A batch of which Spark has offsets/N. `unreadable` is why its journal could not be read.

    `offsets` is the digest of offsets/N, empty where it was not read. `lists` are those of the entries in its sources'
    logs that its decision names, by path, as they are now; what is not there is left out.
    """

    number: int
    range: Range = Range()
    journal: Journal = ()
    unreadable: str = ""
    offsets: str = ""
    lists: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SinkFacts:
    """A sink of the pipeline. Without evidence, `error` is why there is none."""

    name: str
    target: str
    evidence: Evidence | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """One pipeline. `checkpoint_error` is why there is nothing to read, such as a first start that is yet to come.

    `next_batch` is the first that Spark had not checkpointed before the sinks were asked. Journals of batches before
    `kept_from` were pruned then; those before `kept_from_later` may have been pruned while they were read.
    """

    pipeline: str
    guarantee: str
    checkpoint: str
    query: str = ""
    incarnation: int = 0
    holder: str = ""
    sinks: Sequence[SinkFacts] = ()
    batches: Sequence[BatchFacts] = ()
    next_batch: int = 0
    kept_from: int = 0
    kept_from_later: int = 0
    #: Batches that Spark has offsets of and that were left out, because there are too many.
    left_out: int = 0
    #: Batches that are decided, and of which the checkpoint has no plan: it is older than the log.
    forgotten: Sequence[int] = ()
    kafka_source: bool = False
    checkpoint_error: str = ""
