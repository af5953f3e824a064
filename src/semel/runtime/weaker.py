"""The weaker guarantees: a batch is written through, without markers. What a crash may do then is the user's choice."""

from __future__ import annotations

from semel.errors import CommitStalled
from semel.failpoints import failpoint
from semel.protocol.events import Outcome, Started
from semel.protocol.recovery import effective_committables, slot_to_begin_in
from semel.protocol.step import Batch
from semel.runtime.beginning import owed
from semel.runtime.command import start_again
from semel.runtime.phases import Phases, Report, Stage
from semel.runtime.work import Work, batch_failed, mended_by


class Weaker(Phases):
    """One run of one pipeline that is at-most-once, with a log in which batches begin, or at-least-once without one."""

    def run(self, batch: int, stage: Stage) -> Report:
        return self.at_least_once(batch, stage) if self.log is None else self.at_most_once(batch, stage)

    def at_least_once(self, batch: int, stage: Stage) -> Report:
        """Write and commit. No log, no marker: a batch that runs again is written again."""
        failpoint("batch.began")
        return self._write_through(batch, stage, "the batch runs again")

    def at_most_once(self, batch: int, stage: Stage) -> Report:
        """Record that the batch began, then write it. A batch that began once is not written again."""
        failpoint("batch.began")
        if not self._begins(batch):
            return Report(batch, "skipped", staged=False)
        return self._write_through(batch, stage, "the pipeline goes on with the next batch")

    def _begins(self, batch: int) -> bool:
        """Whether nobody has begun the batch before. One that an older driver has decided meanwhile is not skipped."""
        slot = slot_to_begin_in(self._log.journal(batch))
        if slot is not None and self._log.append(Started(self.attempt(batch, slot))):
            return True
        if effective_committables(self._log.journal(batch)) is not None:
            raise owed(batch)
        return False

    def _write_through(self, batch: int, stage: Stage, then: str) -> Report:
        attempt = self.attempt(batch, 0)
        work = Work(batch, Batch(0), ())
        try:
            prepared = self._patiently(attempt, lambda: self._prepare(attempt, self._staged(attempt, stage)))
            failpoint("batch.prepared")
        except Exception as error:
            work.error = error
            self.roll_back(attempt)
            raise batch_failed(work) from error
        self._begin_to_commit(work)
        work.take_on(prepared)
        for committable in prepared:
            (outcome,) = self._commit_all([committable], work)
            if outcome not in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED):
                why = work.errors.get(committable.key)
                raise CommitStalled(
                    f"Batch {batch} could not be committed to {committable.sink}: {work.why_open(committable.sink)}.",
                    data_now=f"some sinks may show batch {batch} already",
                    remedy=f"{mended_by(work, is_stopped=work.was_stopped)}{start_again()}: {then}.",
                ) from why
        failpoint("batch.committed")
        return Report(batch, "committed", sum(c.rows for c in prepared))
