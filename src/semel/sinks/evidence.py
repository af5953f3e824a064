"""What a sink can prove of batches, for audits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from semel.ids import Branch

#: In a Mark: the store does not keep this number.
UNSAID = -1


@dataclass(frozen=True)
class Mark:
    """A marker: the store's own proof that it has committed rows of a batch.

    `attempt` and `incarnation` are those of the attempt that was decided, whoever has committed it.
    `part` is the branch that it stands for, or empty where one marker stands for all rows of the batch in this sink.
    `damage` says that rows which it proves cannot be there any more, where the store can tell. `plan` is the digest of
    the plan that the rows follow from, empty where the marker does not say it.
    """

    batch: int
    part: str
    attempt: int
    incarnation: int
    rows: int
    damage: str = ""
    plan: str = ""


#: As `known_from`: a missing marker proves nothing, whatever the batch.
NOTHING_KNOWN = sys.maxsize


@dataclass(frozen=True)
class Evidence:
    """What a sink can prove of the batches of a pipeline.

    `known_from` is the oldest batch of which a missing marker proves that nothing was committed; `why` says why no
    older one, and `forgets` that this is how the sink works and nothing to worry about. `branches` are staged or
    prepared and not committed.
    """

    marks: tuple[Mark, ...] = ()
    known_from: int = NOTHING_KNOWN
    why: str = ""
    forgets: bool = False
    branches: tuple[Branch, ...] = ()
