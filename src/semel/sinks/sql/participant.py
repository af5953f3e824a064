"""The driver's side of a SQL sink, whichever database it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from semel import formats
from semel.deadline import progressed, within
from semel.errors import BatchFailed, ConfigError, Fenced, SemelError
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Remains, StagedPart, committable_for, refuse_another_plan
from semel.sinks.evidence import NOTHING_KNOWN, Evidence, Mark
from semel.sinks.sql.ahead import Ahead
from semel.sinks.sql.sink import Execute, SqlSink
from semel.sinks.sql.store import Held, Session, StagedGone, piece_name, stage_table

_LOG = logging.getLogger("semel")

LEDGER_BATCHES_KEPT = 1_000
#: At the least, for all that a start asks of a database before it may write.
FENCE_S_MIN = 20.0
#: What is left of staging tables when a batch is committed is waited for no longer.
DROP_S_MAX = 2.0
#: Where tasks write the ledger, the driver prunes it now and then.
PRUNED_EVERY_BATCHES = 100
#: The ledger row of a batch that the driver moves as a whole; a task's own has the name of its branch.
WHOLE = ""
NOTHING: Mapping[str, int] = {}


class SqlParticipant(Participant):
    def __init__(self, sink: SqlSink, context: Context) -> None:
        self.sink = sink
        self.context = context
        self.store = sink.store(context)
        self._moved: dict[str, Held] = {}
        self._ahead: Ahead | None = None

    # Who may write ----------------------------------------------------------------------------------------------------

    def fence(self) -> None:
        # The start waits for a server, but not for ever: its COMMIT may wait for a standby that is away.
        limit = within(max(FENCE_S_MIN, self.sink.timeout_s))
        with limit, self.sink.translated("did not let us fence", refused=ConfigError):
            self.store.create_bookkeeping()
            self._refuse_if_older(self.store.query)
            self.store.end_older_sessions()
            try:
                self._write_fence()
            except Fenced:
                raise
            except Exception:  # noqa: BLE001 - of two first starts one cannot write: what the other wrote is found now
                self._write_fence()

    def _write_fence(self) -> None:
        us = self.context.pipeline, self.sink.name
        named = {"name": self.context.name}
        if "target" in self.store.fence_columns():
            named["target"] = self.sink.table
        with self.store.transaction() as run:
            run("SELECT 1 FROM {fence} WHERE pipeline = %s AND sink = %s FOR UPDATE", us)
            self._refuse_if_older(run)
            ours = (*us, self.context.incarnation)
            # While there is no row there is nothing to lock: a newer one may be there by now, and must stay.
            run("DELETE FROM {fence} WHERE pipeline = %s AND sink = %s AND incarnation <= %s", ours)
            places = ", ".join(["%s"] * (len(ours) + len(named)))
            insert = f"INSERT INTO {{fence}} (pipeline, sink, incarnation, {', '.join(named)}) VALUES ({places})"  # noqa: S608
            run(insert, (*ours, *named.values()))

    def _refuse_if_older(self, run: Execute) -> None:
        us = self.context.pipeline, self.sink.name
        found = run("SELECT incarnation FROM {fence} WHERE pipeline = %s AND sink = %s", us)
        self.context.refuse_if_older(found[0][0] if found else 0, self.sink.describe())

    # Prepare ----------------------------------------------------------------------------------------------------------

    def expect(self, attempt: Attempt) -> None:
        """Move what tasks stage as it comes. Two sinks of one database would be in each other's way."""
        self._end_ahead()
        if not self.sink.is_native and self.store.users == 1:
            name = self._firm_name(attempt)
            self._ahead = Ahead(self.sink, self.store, attempt, name, lambda run: self._may_move(run, attempt))

    def _end_ahead(self, attempt: Attempt | None = None, staged: Mapping[str, int] = NOTHING) -> Ahead | None:
        """What was moved ahead of this attempt, if it can be kept."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        return ahead if ahead.end(staged if ahead.attempt == attempt else NOTHING) else None

    def _may_move(self, run: Execute, attempt: Attempt) -> bool:
        """A driver that woke up would lock rows that its successor needs."""
        if self.context.marked:
            self._refuse_if_older(run)
        return not self._is_done(run, attempt)

    def _is_done(self, run: Execute, attempt: Attempt, plan: str = "") -> bool:
        return self.context.marked and bool(self._marks(run, attempt.batch, plan, WHOLE))

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        with self.sink.translated(f"refused the rows of batch {attempt.batch}", refused=BatchFailed):
            if self.context.marked:
                self._refuse_if_older(self.store.query)
            if self.sink.is_native:
                return self._prepared_by_tasks(attempt, parts)
            return (self._moved_by_the_driver(attempt, parts),)

    def _moved_by_the_driver(self, attempt: Attempt, parts: Sequence[StagedPart]) -> Committable:
        staged = {piece_name(p.branch, n): rows for p in parts for n, rows in enumerate(p.payload.get("pieces", ()))}
        committable = committable_for(self.sink.name, attempt, parts, {"stages": list(staged)})
        name = self._firm_name(attempt)
        ahead = self._end_ahead(attempt, staged)
        with self.store.joined(attempt, name) as (held, run):
            if ahead is None and self._is_done(run, attempt, committable.plan):
                return committable
            if ahead is not None and held is not ahead.held:
                raise RuntimeError("what was moved ahead is not held any more")
            try:
                self._move(run, committable, ahead)
            except StagedGone as error:
                raise self._vanished(attempt, str(error)) from None
            self._moved = {committable.key: held}
            failpoint(f"{self.sink.kind}.moved")
            if name is not None:
                self.store.leave_prepared(held, name)
                return replace(committable, payload={**committable.payload, "prepared": str(name)})
        return committable

    def _firm_name(self, attempt: Attempt) -> Branch | None:
        """The name under which the driver's transaction is left prepared, where it is."""
        return Branch(attempt, self.sink.name, 0, 0) if self.sink.firm and self.context.marked else None

    def _move(self, run: Session, committable: Committable, ahead: Ahead | None = None) -> None:
        """The rows and the ledger row. Whatever a row can do wrong it does here."""
        mover = ahead.mover if ahead and ahead.mover else self.sink.mover(run)
        moved = dict(ahead.moved) if ahead else {}
        for piece in committable.payload["stages"]:
            if piece not in moved:
                moved[piece] = mover.move(stage_table(piece))
                progressed(piece)
        if moved:
            mover.finish()
        found = sum(moved.values())
        if found != committable.rows:
            raise StagedGone(f"{found} of {committable.rows} rows are staged")
        if self.context.marked:
            self._mark(run, committable, committable.rows)

    def _prepared_by_tasks(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        """One for each task: each is committed for itself, so each may be gone for itself."""
        if self.context.marked and attempt.batch % PRUNED_EVERY_BATCHES == 0:
            self._prune(self.store.query, attempt.batch)
        waiting = [p for p in parts if p.payload]
        if waiting:
            there = self.store.prepared()
            gone = [str(p.branch.task) for p in waiting if p.branch not in there]
            if gone:
                raise self._vanished(attempt, f"task {', '.join(gone)}")
        prepared = [committable_for(self.sink.name, attempt, [p], p.payload, key=self._key(p.branch)) for p in parts]
        if self.context.marked and not waiting:
            prepared.append(committable_for(self.sink.name, attempt, [], {"mark": True}, key=f"{self.sink.name}/empty"))
        return tuple(prepared)

    def _key(self, branch: Branch) -> str:
        return f"{self.sink.name}/{branch.task}"

    def _vanished(self, attempt: Attempt, what: str) -> BatchFailed:
        return BatchFailed(
            f"{self.sink.describe()}: staged rows of batch {attempt.batch} vanished before the decision: {what}."
        )

    # Commit -----------------------------------------------------------------------------------------------------------

    def commit(self, committable: Committable) -> Outcome:
        refused = f"did not let us commit batch {committable.attempt.batch}"
        try:
            with self.sink.translated(refused, lasting=ConfigError):
                return self._commit(committable)
        except ConfigError:
            # An earlier try, given up while the server was busy with it, may have come to pass meanwhile: then it is
            # its rows that stand in the way of these.
            with self.sink.translated(refused, lasting=ConfigError):
                if not self._is_proven(committable):
                    raise
        self._conclude(committable)
        return Outcome.ALREADY_COMMITTED

    def _commit(self, committable: Committable) -> Outcome:
        if "stages" in committable.payload:
            return self._commit_whole(committable)
        if committable.payload.get("mark"):
            return self._commit_empty(committable)
        if not committable.payload:
            return Outcome.ALREADY_COMMITTED if self.context.marked else Outcome.COMMITTED
        return self._commit_branch(committable)

    def _is_proven(self, committable: Committable) -> bool:
        """Whether the ledger says that the rows of this committable are visible, or those of a replay of it.

        What this one has left prepared in vain is rolled back.
        """
        if not (self.context.marked and committable.payload):
            return False
        marks = self._marks(self.store.query, committable.attempt.batch, committable.plan)
        if "stages" in committable.payload:
            return WHOLE in marks
        if committable.payload.get("mark"):
            return bool(marks)
        (name,) = committable.branches
        if name in marks:
            return True
        if self._is_a_replay(committable, marks):
            self.store.roll_back_prepared(_branch(name))
            return True
        return False

    def _commit_whole(self, committable: Committable) -> Outcome:
        if self._is_ended(committable):
            outcome = Outcome.COMMITTED
        else:
            try:
                outcome = self._commit_from_stages(committable)
            except StagedGone:
                # Another driver may have committed them meanwhile; then it has dropped them, too.
                if not self._is_proven(committable):
                    return Outcome.GONE
                outcome = Outcome.ALREADY_COMMITTED
        self._conclude(committable)
        return outcome

    def _conclude(self, committable: Committable) -> None:
        """What the committable was made of is of no use any more."""
        if "stages" not in committable.payload:
            return
        failpoint(f"{self.sink.kind}.committed")
        self._moved.pop(committable.key, None)
        self._drop_what_was_moved(committable)

    def _drop_what_was_moved(self, committable: Committable) -> None:
        """The batch is visible: a lock on a staging table, held by a backup for one, must not hold up its commit."""
        done = f"did not drop its staging tables yet, though batch {committable.attempt.batch} is committed"
        try:
            with within(DROP_S_MAX), self.sink.translated(done):
                self.store.drop_staged(committable.payload["stages"])
        except SemelError as error:
            # They are tidied away later, when whatever it is has passed.
            _LOG.warning("%s", error.what)

    def _is_ended(self, committable: Committable) -> bool:
        """Whether what was prepared is committed now. What is not there any more is to be looked for in the ledger."""
        prepared = committable.payload.get("prepared")
        if prepared and self.store.commit_prepared(_branch(prepared)):
            return True
        return self.store.commit(self._moved.get(committable.key))

    def _commit_from_stages(self, committable: Committable) -> Outcome:
        with self.store.transaction() as run:
            if self._is_done(run, committable.attempt, committable.plan):
                return Outcome.ALREADY_COMMITTED
            self._move(run, committable)
        return Outcome.COMMITTED

    def _commit_branch(self, committable: Committable) -> Outcome:
        if self._is_proven(committable):
            return Outcome.ALREADY_COMMITTED
        known = self.store.commit_prepared(_branch(committable.branches[0]))
        failpoint(f"{self.sink.kind}.committed")
        if known:
            return Outcome.COMMITTED
        # It may have been committed between the two questions.
        return Outcome.ALREADY_COMMITTED if self._is_proven(committable) else Outcome.GONE

    def _is_a_replay(self, committable: Committable, marks: Iterable[str]) -> bool:
        """Whether an earlier attempt at this batch is visible. For a mend nothing else can be visible."""
        if committable.mends or not self.context.marked:
            return False
        earlier = (branch.attempt.attempt for mark in marks if (branch := parse_branch(mark)))
        return WHOLE in marks or any(number < committable.attempt.attempt for number in earlier)

    def _commit_empty(self, committable: Committable) -> Outcome:
        """No task marks a batch without rows, so the driver does."""
        with self.store.transaction() as run:
            if self._marks(run, committable.attempt.batch, committable.plan):
                return Outcome.ALREADY_COMMITTED
            self._mark(run, committable, 0)
        failpoint(f"{self.sink.kind}.committed")
        return Outcome.COMMITTED

    # The ledger -------------------------------------------------------------------------------------------------------

    def _mark(self, run: Execute, committable: Committable, rows: int) -> None:
        plan = committable.plan if self.store.keeps_plans else None
        write_mark(run, self.sink.name, committable.attempt, WHOLE, rows, plan)
        self._prune(run, committable.attempt.batch)

    def _prune(self, run: Execute, batch: int) -> None:
        old = "FROM {ledger} WHERE pipeline = %s AND sink = %s AND batch < %s"
        values = self.context.pipeline, self.sink.name, batch - LEDGER_BATCHES_KEPT
        # MySQL locks the row behind those that it deletes, and must not wait for one that is prepared.
        if run(f"SELECT 1 {old} LIMIT 1", values):
            run(f"DELETE {old}", values)

    def _marks(self, run: Execute, batch: int, plan: str, part: str | None = None) -> list[str]:
        """The parts of a batch that are visible. Rows of another plan are not those that anybody asks for."""
        said = "plan" if self.store.keeps_plans else "''"
        found = run(
            f"SELECT part, {said} FROM {{ledger}} WHERE pipeline = %s AND sink = %s AND batch = %s",  # noqa: S608 - ours
            (self.context.pipeline, self.sink.name, batch),
        )
        found = [row for row in found if part is None or row[0] == part]
        for _, marked in found:
            refuse_another_plan(self.sink, batch, marked, plan)
        return [visible for visible, _ in found]

    # Leftovers --------------------------------------------------------------------------------------------------------

    def recover(self) -> Remains:
        with self.sink.in_time(), self.sink.translated("did not say what is left in it"):
            branches = self._leftovers()
            if not (self.context.marked and self.store.has_bookkeeping()):
                return Remains(branches)
            self._refuse_newer()
            newest = self.store.query(
                "SELECT max(batch) FROM {ledger} WHERE pipeline = %s AND sink = %s",
                (self.context.pipeline, self.sink.name),
            )
            writers = self._writers()
        return Remains.of(branches, newest[0][0], writers, self.context)

    def _writers(self) -> list[tuple[str, PipelineId]]:
        """Other pipelines with rows in this table, by name, whatever they call the sink.

        semel 0.1 did not say into which table: there the name of the sink tells.
        """
        target = "f.target" if "target" in self.store.fence_columns() else "''"
        found = self.store.query(
            f"SELECT f.name, f.pipeline, f.sink, {target} FROM {{fence}} f WHERE f.pipeline <> %s "  # noqa: S608 - ours
            "AND EXISTS (SELECT 1 FROM {ledger} l WHERE l.pipeline = f.pipeline AND l.sink = f.sink)",
            (self.context.pipeline,),
        )
        here, unsaid = self.sink.table, (self.sink.name, "")
        return [(name, PipelineId(who)) for name, who, sink, to in found if to == here or (sink, to) == unsaid]

    def evidence(self, batches: range) -> Evidence:
        """The ledger rows of these batches and of younger ones."""
        us = self.context.pipeline, self.sink.name
        with self.sink.in_time(), self.sink.translated("did not show its ledger"):
            branches = self._leftovers()
            why = f"there is no ledger of this pipeline beside {self.sink.describe()}"
            if not self.store.has_bookkeeping():
                return Evidence(why=why, branches=branches)
            self._refuse_newer()
            plan = "plan" if self.store.keeps_plans else "''"
            found = self.store.query(
                f"SELECT batch, part, attempt, incarnation, row_count, {plan} FROM {{ledger}} "  # noqa: S608 - ours
                "WHERE pipeline = %s AND sink = %s AND batch >= %s",
                (*us, batches.start),
            )
            ((newest,),) = self.store.query("SELECT max(batch) FROM {ledger} WHERE pipeline = %s AND sink = %s", us)
            fenced = self.store.query("SELECT 1 FROM {fence} WHERE pipeline = %s AND sink = %s", us)
        marks = tuple(_ledger_mark(*row) for row in found)
        if newest is None:
            return Evidence(marks, 0 if fenced else NOTHING_KNOWN, why, branches=branches)
        # Where tasks write the ledger, it is pruned before the first of them has.
        known_from = max(0, newest + 1 - LEDGER_BATCHES_KEPT)
        kept = f"its ledger keeps {LEDGER_BATCHES_KEPT:,} batches"
        return Evidence(marks, known_from, kept, forgets=True, branches=branches)

    def _refuse_newer(self) -> None:
        """Raise NewerRecord when a newer semel has written ledger rows of this pipeline and sink."""
        if "format" not in self.store.ledger_columns():
            return
        us = self.context.pipeline, self.sink.name
        ((newest,),) = self.store.query("SELECT max(format) FROM {ledger} WHERE pipeline = %s AND sink = %s", us)
        what = f"The ledger of sink {self.sink.name} ({self.sink.describe()})"
        formats.refuse_newer(what, newest or formats.FIRST, formats.LEDGER)

    def _leftovers(self) -> tuple[Branch, ...]:
        found = {*self.store.staged(), *self.store.prepared()}
        ours = {b for b in found if b.attempt.pipeline == self.context.pipeline and b.sink == self.sink.name}
        for held in self._moved.values():
            # A batch without rows has nothing staged, but its open transaction must be found, too, to be aborted.
            if self.store.holds(held) and not any(b.attempt == held.attempt for b in ours):
                ours.add(Branch(held.attempt, self.sink.name, 0, 0))
        return tuple(sorted(ours))

    def abort(self, branches: Iterable[Branch]) -> None:
        named = set(branches)
        self._end_ahead()
        if not named:
            return
        with self.sink.translated("did not let us roll back"):
            self.store.forget({b.attempt for b in named})
            # What is prepared has read what is staged, and keeps it from being dropped.
            for branch in sorted(named & self.store.prepared()):
                self.store.roll_back_prepared(branch)
            staged = self.store.staged()
            self.store.drop_staged(piece for b in sorted(named & set(staged)) for piece in staged[b])

    def close(self) -> None:
        self._end_ahead()
        self.store.release()


def write_mark(run: Execute, sink: str, attempt: Attempt, part: str, rows: int, plan: str | None = None) -> None:
    """The proof that rows are visible: in the same transaction as the rows. A ledger of semel 0.1 holds no plan."""
    mark = attempt.pipeline, sink, attempt.batch, part, attempt.attempt, attempt.incarnation, rows
    names = "pipeline, sink, batch, part, attempt, incarnation, row_count"
    if plan is None:
        run(f"INSERT INTO {{ledger}} ({names}) VALUES (%s, %s, %s, %s, %s, %s, %s)", mark)  # noqa: S608 - ours
    else:
        numbered = f"INSERT INTO {{ledger}} ({names}, format, plan) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"  # noqa: S608
        run(numbered, (*mark, formats.LEDGER, plan))


def _ledger_mark(batch: int, part: str, attempt: int, incarnation: int, rows: int, plan: str) -> Mark:
    return Mark(batch, part, attempt, incarnation, rows, plan=plan)


def _branch(name: str) -> Branch:
    branch = parse_branch(name)
    if branch is None:
        raise ValueError(f"not the name of a branch: {name}")
    return branch
