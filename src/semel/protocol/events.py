"""What the coordinator is told (past tense), and the records that it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from semel.formats import COMMITTABLE
from semel.ids import Attempt
from semel.protocol.plans import Plan


class Outcome(Enum):
    """How a commit ended, as the store itself says."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already committed"
    RETRY = "retry"
    GONE = "gone"
    IN_DOUBT = "in doubt"


@dataclass(frozen=True)
class Committable:
    """All that a fresh process needs to commit: it is stored in the decision and handed to the sink as it was.

    `branches` names what it covers, so that recovery keeps those and drops the rest. `payload` is the sink's own, plain
    JSON. `fingerprint` is that of its rows, where the sink commits task by task: if it is proven gone, a replay is
    searched for it. `mends` says that it replaces one that was gone. `plan` is the digest of the plan that its rows
    follow from, empty where no plan is known. `format` numbers the form of the payload and of what it names.
    """

    sink: str
    key: str
    attempt: Attempt
    rows: int
    branches: tuple[str, ...] = ()
    payload: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    mends: bool = False
    plan: str = ""
    format: int = COMMITTABLE


# Events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Every sink has promised: these committables are durable and invisible."""

    keys: frozenset[str]


@dataclass(frozen=True)
class PrepareFailed:
    """A task or a sink could not promise."""


@dataclass(frozen=True)
class DecisionRecorded:
    """The slot is ours and durable."""


@dataclass(frozen=True)
class DecisionRefused:
    """The slot was taken by somebody else."""


@dataclass(frozen=True)
class DecisionUnanswered:
    """The log did not say whether the slot is ours."""


@dataclass(frozen=True)
class Superseded:
    """A newer incarnation has claimed the pipeline: it finds our decision and commits it."""


@dataclass(frozen=True)
class CommitAnswered:
    """A sink answered the commit of one committable."""

    key: str
    outcome: Outcome


Event: TypeAlias = (
    Prepared | PrepareFailed | DecisionRecorded | DecisionRefused | DecisionUnanswered | Superseded | CommitAnswered
)


# Records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aborted:
    """The slot is closed: the attempt that might have been decided here never will be."""

    attempt: Attempt


@dataclass(frozen=True)
class Decided:
    """The batch is decided, for the rows of this plan.

    `mends` marks a later slot that replaces committables proven gone. Releases before 0.2 recorded no plan.
    """

    attempt: Attempt
    committables: tuple[Committable, ...]
    mends: bool = False
    plan: Plan | None = None


@dataclass(frozen=True)
class Started:
    """At-most-once only: the batch was begun and shall not be begun again."""

    attempt: Attempt


Record: TypeAlias = Aborted | Decided | Started
Journal: TypeAlias = tuple[Record, ...]
