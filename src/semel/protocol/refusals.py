"""Why a start is refused: facts in, the reason out. The runtime puts it into words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from semel.ids import PipelineId


class Refusal(Enum):
    ANOTHERS_CHECKPOINT = "the log belongs to another query than the checkpoint"
    ANOTHER_NAME = "the checkpoint belongs to a pipeline of another name"
    REPLACED = "the sink holds what this pipeline wrote under another checkpoint"
    ROLLED_BACK = "the sink knows batches that the checkpoint does not"
    TEMPORARY_CHECKPOINT = "the checkpoint ends with the query, so that the next start would write everything again"
    STARTS_LATE = "the sink has not had the batches before the one that it would begin with"
    OVERTAKEN = "the batch that Spark runs is over, or the one behind it is planned: another driver has gone on"
    OWED = "a batch that was decided under exactly-once may not be visible everywhere yet"
    REMOTE_EXECUTORS = "executors run on other machines, where they cannot reach the sink"


#: The words by which a user says of a sink that something is meant: it begins in the middle of the stream ...
NOW = "now"
#: ... or it is to get a second time what this pipeline wrote into it under another checkpoint.
AGAIN = "again"


def words(starts: str) -> frozenset[str]:
    """What a user said of a sink: one of the two words, or both with a comma between them."""
    return frozenset(word.strip() for word in starts.split(",")) - {""}


@dataclass(frozen=True)
class Holder:
    """Whose checkpoint it is. `name` is empty when the user gave none."""

    pipeline: PipelineId
    name: str = ""


@dataclass(frozen=True)
class SinkFacts:
    """What a sink holds of this pipeline at start.

    `marked` is the newest batch that it has a marker of, `staged` the newest of which something is staged; -1 where
    there is none. `namesakes` are other queries that left markers there under our name. `starts` is what the user said.
    """

    marked: int = -1
    staged: int = -1
    namesakes: Collection[PipelineId] = ()
    starts: str = ""


def refuse_holder(found: Holder, ours: Holder) -> Refusal | None:
    """Whether a checkpoint that was used before may be used by us."""
    if found.pipeline != ours.pipeline:
        return Refusal.ANOTHERS_CHECKPOINT
    if found.name and ours.name and found.name != ours.name:
        return Refusal.ANOTHER_NAME
    return None


def refuse_replaced(sink: SinkFacts) -> Refusal | None:
    """A checkpoint that knows nothing of a sink which has seen this pipeline would write everything again."""
    return Refusal.REPLACED if sink.namesakes and sink.marked < 0 and AGAIN not in words(sink.starts) else None


def refuse_rolled_back(sink: SinkFacts, *, next_batch: int, is_decided: bool) -> Refusal | None:
    """A checkpoint that is older than a sink would run batches a second time. Only what is decided can be marked.

    `next_batch` is the first that the checkpoint and the log do not know as over. When it is decided, Spark may have
    begun the one behind it: `commits/N` is on disk only when batch N+1 is decided, and its tasks stage before that.
    """
    newest_decided = next_batch if is_decided else next_batch - 1
    begun = newest_decided + 1
    return Refusal.ROLLED_BACK if sink.marked > newest_decided or sink.staged > begun else None


@dataclass(frozen=True)
class Beginning:
    """The first batch that a sink will get from this checkpoint.

    `followed_on` says that it is proven to have had the batch before that. `starts` is what the user said of the sink.
    """

    batch: int
    followed_on: bool = False
    starts: str = ""


def begins_late(beginning: Beginning) -> bool:
    """Whether the stream has rows before this batch that the sink did not get from this checkpoint."""
    return beginning.batch > 0 and not beginning.followed_on


def refuse_beginning(beginning: Beginning) -> Refusal | None:
    """A sink that would begin in the middle of the stream lacks what came before, and nobody would see it."""
    return Refusal.STARTS_LATE if begins_late(beginning) and NOW not in words(beginning.starts) else None


@dataclass(frozen=True)
class UnderWay:
    """What is known of the batch that Spark runs while a driver starts.

    `is_over` says that its plan and its end are both in the checkpoint. `is_replanned` says that this plan is not the
    one that the batch was decided for.
    """

    batch: int
    is_next_planned: bool = False
    is_over: bool = False
    newest_decided: int = -1
    is_replanned: bool = False


def refuse_overtaken(query: UnderWay) -> Refusal | None:
    """A query whose batch another driver has ended cannot end it. Nobody must be fenced for it.

    Of a batch that is marked as over this is known only while nothing newer is decided: a copy of a checkpoint may know
    the end of a batch and not the plan of a newer one. That must be put back, and for this somebody has to start. Nor
    has anybody ended a batch whose decided plan is not there: the copy knew its end, and Spark has planned it anew.
    """
    ended = query.is_over and query.newest_decided <= query.batch and not query.is_replanned
    return Refusal.OVERTAKEN if query.is_next_planned or ended else None


def refuse_weaker(*, newest_decided: int, next_batch: int) -> Refusal | None:
    """A weaker guarantee commits nothing forward: it would drop, or write again, what a decision has promised.

    `next_batch` is the first that the checkpoint does not know as over.
    """
    return Refusal.OWED if newest_decided >= next_batch else None


def refuse_temporary(*, is_temporary: bool, remembers: bool) -> Refusal | None:
    """A guarantee that remembers what is done cannot do so in a checkpoint that nobody finds again."""
    return Refusal.TEMPORARY_CHECKPOINT if is_temporary and remembers else None


def refuse_executors(*, are_remote: bool, reaches_remote: bool) -> Refusal | None:
    """Tasks on other machines cannot stage rows for a store that only this machine has."""
    return Refusal.REMOTE_EXECUTORS if are_remote and not reaches_remote else None
