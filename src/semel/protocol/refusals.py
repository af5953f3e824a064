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


@dataclass(frozen=True)
class Holder:
    """Whose checkpoint it is. `name` is empty when the user gave none."""

    pipeline: PipelineId
    name: str = ""


@dataclass(frozen=True)
class SinkFacts:
    """What a sink holds of this pipeline at start.

    `marked` is the newest batch that it has a marker of, `staged` the newest of which something is staged; -1 where
    there is none. `namesakes` are other queries that left markers there under our name.
    """

    marked: int = -1
    staged: int = -1
    namesakes: Collection[PipelineId] = ()


def refuse_holder(found: Holder, ours: Holder) -> Refusal | None:
    """Whether a checkpoint that was used before may be used by us."""
    if found.pipeline != ours.pipeline:
        return Refusal.ANOTHERS_CHECKPOINT
    if found.name and ours.name and found.name != ours.name:
        return Refusal.ANOTHER_NAME
    return None


def refuse_replaced(sink: SinkFacts) -> Refusal | None:
    """A checkpoint that knows nothing of a sink which has seen this pipeline would write everything again."""
    return Refusal.REPLACED if sink.namesakes and sink.marked < 0 else None


def refuse_rolled_back(sink: SinkFacts, *, next_batch: int, is_decided: bool) -> Refusal | None:
    """A checkpoint that is older than a sink would run batches a second time. Only what is decided can be marked.

    `next_batch` is the first that the checkpoint and the log do not know as over. When it is decided, Spark may have
    begun the one behind it: `commits/N` is on disk only when batch N+1 is decided, and its tasks stage before that.
    """
    newest_decided = next_batch if is_decided else next_batch - 1
    begun = newest_decided + 1
    return Refusal.ROLLED_BACK if sink.marked > newest_decided or sink.staged > begun else None
