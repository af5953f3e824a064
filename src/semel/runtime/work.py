"""What the coordinator holds while it works on one batch, and what must be said of it when it does not end well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from semel.decisions.base import StoreUnanswered
from semel.errors import BatchFailed, CommitStalled, QueryStopped, SemelError, SinkUnavailable, lasts
from semel.protocol.events import Committable, Journal, Outcome
from semel.protocol.plans import Plan
from semel.protocol.states import State
from semel.protocol.step import Batch
from semel.runtime.command import start_again
from semel.runtime.commits import Rhythm
from semel.runtime.fingerprint import is_in_order
from semel.runtime.hands import Written

CORRECT_IT = "correct the sink or its settings"
MORE_TIME = "or give it more time (commit_limits, commit_patience_s),"


def may_mend_itself(error: BaseException | None) -> bool:
    """Whether it is worth asking again. Any other error is one of a program, or somebody has to change something."""
    if isinstance(error, OSError):
        return not lasts(error)
    return isinstance(error, SinkUnavailable | StoreUnanswered)


@dataclass
class Work:
    """What the coordinator holds while it works on one batch."""

    id: int
    batch: Batch
    journal: Journal
    committables: dict[str, Committable] = field(default_factory=dict)
    proposal: tuple[Committable, ...] = ()
    plan: Plan | None = None
    error: BaseException | None = None
    mends: int = 0
    #: The rows that are gone are not in a replay: to start again does not help.
    unmendable: bool = False
    ms: dict[str, float] = field(default_factory=dict)
    #: By key: how the sinks answered so far, and the last error of each.
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    #: The keys of those that did not answer in time.
    unanswered: set[str] = field(default_factory=set)
    give_up_at: float = 0.0
    #: When to tell that it waits; None before the first commit.
    rhythm: Rhythm | None = None
    #: Parts of commits that took their time and are done.
    progress: set[object] = field(default_factory=set)
    #: Something was not asked again because the time was over.
    ran_out: bool = False
    #: Why the log did not say whether the batch may be committed.
    log_error: BaseException | None = None
    #: Nobody waits for its answers any more.
    is_given_up: bool = False
    was_stopped: bool = False
    is_deciding: bool = False

    def take_on(self, committables: Iterable[Committable]) -> None:
        """These are to be committed. Those of a mend take the place of what is gone."""
        for committable in committables:
            self.outcomes.pop(committable.key, None)
            self.errors.pop(committable.key, None)
            self.committables[committable.key] = committable

    @property
    def state(self) -> State:
        return self.batch.state

    @property
    def digest(self) -> str:
        """The digest of the plan; empty where none is known."""
        return self.plan.digest if self.plan is not None else ""

    @property
    def broken_sinks(self) -> list[str]:
        """The sinks of which something is gone."""
        return self.sinks_of(self.batch.gone)

    @property
    def open_sinks(self) -> list[str]:
        """The sinks that have yet to commit something."""
        doubtful = self.batch.having(Outcome.IN_DOUBT)
        return self.sinks_of(set(self.committables) - self._visible - doubtful)

    @property
    def visible_sinks(self) -> list[str]:
        """The sinks that show the batch, and those that show a part of it."""
        undone = self.open_now
        return [f"part of {sink}" if sink in undone else sink for sink in self.sinks_of(self._visible)]

    @property
    def open_now(self) -> list[str]:
        """The sinks of which something is decided and not known to be visible."""
        return self.sinks_of(set(self.committables) - self._visible)

    @property
    def _visible(self) -> set[str]:
        seen = dict(self.outcomes)
        return {key for key, o in seen.items() if o in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)}

    @property
    def data_now(self) -> str:
        done, open_ = ", ".join(self.visible_sinks) or "no sink yet", ", ".join(self.open_sinks)
        return f"batch {self.id} is decided; visible in: {done}; still to commit: {open_}"

    @property
    def error_of_open(self) -> BaseException | None:
        """Why something is not committed. If several sinks have a cause, it is that of the first one."""
        own = [error for sink in self.open_now if (error := self.error_of(sink)) is not None]
        return own[0] if own else self.error

    def error_of(self, sink: str) -> BaseException | None:
        found = dict(self.errors)
        own = [found[c.key] for c in self.of(sink) if c.key in found and c.key not in self._visible]
        # What cannot mend itself comes first: it must be mended by somebody.
        return min(own, key=may_mend_itself, default=None)

    @property
    def said_last(self) -> str:
        if self.log_error is not None:
            return f"the decision log: {cause_of(self.log_error)}"
        return "; ".join(f"{s}: {cause_of(e)}" for s in self.open_now if (e := self.error_of(s)) is not None)

    def why_open(self, sink: str) -> str:
        error = self.error_of(sink) or self.error
        if error is None and any(c.key in self.unanswered for c in self.of(sink)):
            return "it gave no answer"
        return cause_of(error)

    @property
    def written(self) -> Written:
        """How tasks have written what is decided. Each leaves a branch in each sink."""
        tasks = max(sum(len(c.branches) for c in self.of(sink)) for sink in self.sinks_of(self.committables))
        return Written(tasks, all(is_in_order(c.fingerprint) for c in self.committables.values() if c.fingerprint))

    def sinks_of(self, keys: Iterable[str]) -> list[str]:
        """A sink may have a committable for each of its tasks. Users know sinks."""
        return sorted({self.committables[key].sink for key in keys})

    def of(self, sink: str) -> list[Committable]:
        return [c for c in self.committables.values() if c.sink == sink]


def batch_failed(work: Work) -> SemelError:
    if isinstance(work.error, SemelError):
        return work.error
    return BatchFailed(f"Batch {work.id} failed before it was decided: {cause_of(work.error)}.")


def stalled(work: Work, log: str, *, is_stopped: bool) -> CommitStalled:
    """The batch is decided and not visible everywhere, because it took too long or because it was stopped.

    `log` says which log the decision is in.
    """
    # One that answers after all, when nobody waits for it any more, is visible by now: the next line says so.
    sinks = work.open_now or work.sinks_of(work.unanswered)
    causes = "; ".join(f"{sink}: {work.why_open(sink)}" for sink in sinks)
    if work.log_error is not None:
        why = f"{log} did not say whether a newer driver runs this pipeline: {cause_of(work.log_error)}"
        causes = f"{', '.join(sinks)}: {why}"
    remedy = f"{mended_by(work, is_stopped=is_stopped)}{start_again()}"
    how = "and was stopped before it was" if is_stopped else "but could not be"
    return CommitStalled(
        f"Batch {work.id} is decided {how} committed to {causes}.",
        data_now=work.data_now,
        remedy=f"{remedy[0].upper()}{remedy[1:]}: it commits what is left and runs nothing twice.",
    )


def mended_by(work: Work, *, is_stopped: bool) -> str:
    """What somebody has to do before the pipeline is started again, as the beginning of a sentence."""
    error = work.log_error or work.error_of_open
    if isinstance(error, QueryStopped):
        return ""
    if error is not None and not may_mend_itself(error):
        own = isinstance(error, SemelError) and error.remedy != type(error).remedy
        remedy = str(getattr(error, "remedy", "")).partition(", then start")[0].rstrip(".")
        return f"This error does not mend itself: {remedy if own else CORRECT_IT} and "
    what = "Bring the disk or the service of the decision log back" if work.log_error else "Bring the sink back"
    # A client that gave up in time has an error of its own: its store need not be away, it may be slow.
    return f"{what}, {MORE_TIME} and " if work.ran_out and not is_stopped else f"{what} and "


def cause_of(error: BaseException | None) -> str:
    """Why a sink failed, in one line, to stand in the first line of our own error."""
    if error is None:
        return "the sink gave no reason"
    if isinstance(error, SemelError):
        return error.what.rstrip(".")
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(". ")
