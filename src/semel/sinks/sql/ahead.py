"""The driver moves the first pieces of a batch while tasks still stage the others.

A move is one connection, and one core of the server. If it began when the last task has ended, the server would wait
for Spark, and then Spark for the server.

    task 0    stage piece 0 | stage piece 1 | stage piece 2 |
    task 1    stage piece 0 | stage piece 1 |
    driver                    move           move           prepare: move the rest, mark, hold

Nothing rests on it. What was moved ahead is in the open transaction of this attempt, unseen. If anything goes wrong, or
a piece was moved that is not among those that the tasks report in the end (a task that was tried twice), all of it is
rolled back, and `prepare` moves the batch as if nobody had begun. The transaction keeps a lock on each table that it
read, so that none of them can be replaced by another of the same name meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from semel.deadline import seconds_left
from semel.errors import SinkUnavailable
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch
from semel.sinks.sql.moves import Mover
from semel.sinks.sql.sink import Execute, SqlSink
from semel.sinks.sql.store import Held, Store, stage_table

#: Before the first look for pieces: most small batches are over by then.
FIRST_LOOK_S = 0.1
#: Between two looks, and how much longer than such a look takes.
LOOK_PAUSE_S = 0.02
LOOK_SHARE = 10

_LOG = logging.getLogger("semel")


class Ahead:
    """Moves what is staged of one attempt, in a thread of its own, until it is ended.

    `may_move` says, in the transaction, whether there is anything to move: not when the batch is visible already.
    """

    def __init__(
        self, sink: SqlSink, store: Store, attempt: Attempt, name: Branch | None, may_move: Callable[[Execute], bool]
    ) -> None:
        self.attempt = attempt
        self.name = name
        #: Moved pieces with their rows.
        self.moved: dict[str, int] = {}
        self.mover: Mover | None = None
        #: The transaction that they are in.
        self.held: Held | None = None
        self._sink = sink
        self._store = store
        self._may_move = may_move
        self._branch: Branch | None = None
        self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="semel-ahead", daemon=True)
        self._thread.start()

    def end(self, staged: Mapping[str, int]) -> bool:
        """Stop after the piece in hand. Whether what was moved can be kept, because all of it is among these rows.

        If not, it is rolled back.
        """
        self._ended.set()
        self._thread.join(seconds_left())
        if self._thread.is_alive():
            # It ends behind its piece. What it leaves open is rolled back by whoever opens the next transaction.
            raise SinkUnavailable(f"{self._sink.describe()} is still moving rows of {self.attempt}.")
        if not self.moved:
            return False
        kept = not self._failed and self._store.holds(self.held) and self.moved.items() <= staged.items()
        if not kept:
            self._store.forget([self.attempt])
        return kept

    def _work(self) -> None:
        pause_s = FIRST_LOOK_S
        while not self._ended.wait(pause_s):
            began = time.monotonic()
            try:
                ready = list(self._ready())
                pause_s = 0.0 if ready else max(LOOK_PAUSE_S, LOOK_SHARE * (time.monotonic() - began))
                for branch, piece in ready:
                    if self._ended.is_set() or not self._move(piece):
                        return
                    self._branch = branch
            except Exception as error:  # noqa: BLE001 - `prepare` meets the same trouble, and says so
                _LOG.info("%s: rows are not moved ahead any more: %s", self.attempt, error)
                self._failed = True
                with suppress(Exception):
                    self._store.forget([self.attempt])
                return

    def _ready(self) -> Iterator[tuple[Branch, str]]:
        """Pieces that are whole, in their order. Where the one in hand can be seen, it is not: it is the last.

        Of a task that is tried several times at once, one try is followed. We go on with the task whose rows we have
        moved last: keys of one task are often neighbours, and an index is filled sooner from one end than from two.
        """
        followed: set[int] = set()
        for branch, pieces in sorted(self._store.staged().items(), key=lambda found: found[0] != self._branch):
            if branch.attempt != self.attempt or branch.sink != self._sink.name or branch.task in followed:
                continue
            followed.add(branch.task)
            whole = pieces if self._store.hides_new_tables else pieces[:-1]
            yield from ((branch, piece) for piece in whole if piece not in self.moved)

    def _move(self, piece: str) -> bool:
        with self._store.joined(self.attempt, self.name) as (held, run):
            if self.mover is None:
                if not self._may_move(run):
                    return False
                self.mover, self.held = self._sink.mover(run), held
            if held is not self.held:
                raise RuntimeError("what was moved ahead is not held any more")
            self.moved[piece] = self.mover.move(stage_table(piece))
        failpoint(f"{self._sink.kind}.ahead")
        return True
