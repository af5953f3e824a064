"""What happened in a run, as data: all that the audit and the report know. Nothing in here does anything.

Rows are known by their number: the workload makes row 0, 1, 2 ... of the input, and a reader turns the identity that it
finds in a store back into the number. So the audit never looks into a store, and can be tried on histories that no
pipeline would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: In `batch_of`: no batch has read this row yet, or nobody can tell which one did.
NO_BATCH = -1


@dataclass(frozen=True)
class Look:
    """What a reader saw at once: rows that were not there at its look before, and rows that no longer were.

    `began_s` and `ended_s` are times of day (time.time) before the store was asked and after it answered.
    """

    began_s: float
    ended_s: float
    added: Sequence[int] = ()
    gone: Sequence[int] = ()


@dataclass(frozen=True)
class Sights:
    """All that a reader of one sink saw.

    `snapshots` says that each look shows one state of the whole store, as one statement of a database does. A reader of
    a Kafka topic gets its partitions one by one, so that a batch may arrive over several looks. `in_order` has the rows
    of each partition in the order of the store, where it keeps one. `rows` is the last look, taken when all was over:
    how often each row is there. `strangers` are identities that nobody fed, in words. `left` is what is open, prepared
    or staged at the end, in words.
    """

    sink: str
    kind: str
    snapshots: bool = True
    looks: Sequence[Look] = ()
    #: How many of them, the last ones, were taken when all was over.
    last_looks: int = 1
    misses: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    in_order: Mapping[int, Sequence[int]] = field(default_factory=dict)
    strangers: Sequence[str] = ()
    left: Sequence[str] = ()
    #: Empty, or why the last look could not be taken: then nothing is known of this sink.
    error: str = ""


@dataclass(frozen=True)
class BatchSeen:
    """A batch as Spark planned it, and when the decision log first said that it is decided (0 while it is not)."""

    number: int
    decided_s: float = 0.0
    checkpointed: bool = False


@dataclass(frozen=True)
class Event:
    """Something on the timeline. `kind` is one of KINDS; `lane` is "pipeline", "disk" or the name of a server.

    `until_s` is the end of what lasts (a life, an outage, a batch); 0 for what happens at once. `batch` is the number
    of the batch that it is about, where there is one.
    """

    at_s: float
    kind: str
    lane: str
    what: str
    until_s: float = 0.0
    batch: int = NO_BATCH


#: The kinds of events: a life of the pipeline, the end of a batch, a fault that was injected, a recovery (a batch that
#: was found decided and committed forward, or run again), a server that was away, and what else is worth a line.
KINDS = ("life", "batch", "fault", "recovery", "outage", "note")


@dataclass(frozen=True)
class History:
    """One run. `expected` says how often row n is to be in a sink; `key_of` gives the key of a row, whose rows keep
    their order. `batch_of` has the batch of each row, by its number; it is empty where rows of the output do not belong
    to one row of the input (aggregations), and `why_no_batches` says so.
    """

    seed: int
    pipeline: str
    guarantee: str
    rows: int
    sights: Sequence[Sights]
    expected: Callable[[int, str], int] = lambda n, sink: 1  # noqa: ARG005 - each row once, whatever it is
    key_of: Callable[[int], str] | None = None
    batch_of: Sequence[int] = ()
    why_no_batches: str = ""
    batches: Mapping[int, BatchSeen] = field(default_factory=dict)
    events: Sequence[Event] = ()
    #: How often each kind of fault was injected; kills are those that ended a process by SIGKILL.
    faults: Mapping[str, int] = field(default_factory=dict)
    kills: int = 0
    #: The power cuts by which something was lost: others show nothing.
    power_cuts: int = 0
    #: What the run was asked to reach.
    rows_wanted: int = 0
    kills_wanted: int = 0
    #: Empty, or what kept the run from its end: the data are not known to be right then.
    broken: str = ""
    #: Files beside the report: what each life said.
    logs: Sequence[str] = ()
    began_s: float = 0.0
    ended_s: float = 0.0
    #: The command that plays the same plan again.
    replay: str = ""
