"""A pipeline with known input and known output, run in a child process that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.failpoints import VARIABLE
from semel.protocol.invariants import nothing_duplicated, nothing_lost
from semel.protocol.recovery import effective_committables
from semel.session.local_files import CLASS, HADOOPS_OWN, SETTING
from semel.sinks.files import committed_files
from tests.e2e.child import Setup, arguments

Rows = Counter[Hashable]
LIFE_SECONDS_MAX = 180
KEYS = 4


@dataclass(frozen=True)
class Life:
    """How one run of the child ended, and what it said."""

    returncode: int
    events: tuple[dict[str, Any], ...]
    stderr: str

    @property
    def killed(self) -> bool:
        return self.returncode == -signal.SIGKILL

    @property
    def error(self) -> str:
        return next((e["text"] for e in self.events if e["event"] == "failed"), "")

    def batches(self, how: str) -> list[int]:
        return [e["batch"] for e in self.events if e["event"] == "batch" and e["how"] == how]


@dataclass
class Lives:
    """A pipeline that is started and killed again and again."""

    setup: Setup
    children: list[subprocess.Popen[str]] = field(default_factory=list, init=False)

    @property
    def folder(self) -> Path:
        return Path(self.setup.folder)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def start(self, failpoints: str = "", **changes: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, VARIABLE: failpoints, "PYTHONWARNINGS": "ignore"}
        child = subprocess.Popen(
            arguments(replace(self.setup, **changes)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def finish(self, child: subprocess.Popen[str], seconds_max: float = LIFE_SECONDS_MAX) -> Life:
        try:
            out, err = child.communicate(timeout=seconds_max)
        finally:
            # Whatever is left of its process group: all of it is ours.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        events = tuple(json.loads(line) for line in out.splitlines() if line.startswith("{"))
        return Life(child.returncode, events, err)

    def end(self) -> None:
        """Kill what a failed test left behind, a stopped zombie for example."""
        for child in self.children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()

    def live(self, failpoints: str = "", **changes: Any) -> Life:
        return self.finish(self.start(failpoints, **changes))

    def in_turns(self) -> dict[str, Any]:
        """What to change for the next life, so that each goes on with files that the other way has written."""
        hadoops = len(self.children) % 2 == 1
        return {"conf": (*self.setup.conf, (SETTING, HADOOPS_OWN if hadoops else CLASS))}


@dataclass
class Game(Lives):
    """Input files, one per batch, and what each batch must add to the output."""

    batches: int = 24
    rows: int = 20
    expected: list[Rows] = field(default_factory=list)

    def deal(self) -> Game:
        """Write the input. The file source orders files by their time, so batch i reads file i."""
        folder = self.folder / "in"
        folder.mkdir(parents=True)
        totals: dict[str, tuple[int, int]] = {}
        for batch in range(self.batches):
            orders = [self._order(batch * self.rows + k) for k in range(self.rows)]
            path = folder / f"{batch:05d}.json"
            path.write_text("".join(json.dumps(order) + "\n" for order in orders))
            os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))
            for order in orders:
                n, total = totals.get(order["key"], (0, 0))
                totals[order["key"]] = (n + 1, total + order["amount"])
            self.expected.append(self._expected(orders, totals))
        return self

    def _order(self, number: int) -> dict[str, Any]:
        minute, second = divmod(number, 60)
        at = f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:{second:02d}Z"
        return {"id": number, "key": f"k{number % KEYS}", "amount": number * 7 % 101, "at": at}

    def _expected(self, orders: list[dict[str, Any]], totals: dict[str, tuple[int, int]]) -> Rows:
        """Stateless: the rows. Stateful: the running totals of the batch's keys, which show a wrong state at once."""
        if self.setup.shape == "stateful":
            return Counter((key, *totals[key]) for key in {o["key"] for o in orders})
        return Counter((o["id"], o["key"], o["amount"]) for o in orders)

    # Looking ----------------------------------------------------------------------------------------------------------

    def visible(self, sink: str = "") -> Rows:
        """What a user sees."""
        rows = self._sqlite() if (sink or self.setup.sink) == "sqlite" else self._files()
        return Counter(rows)

    def _sqlite(self) -> Iterator[Hashable]:
        path = self.folder / "out.db"
        if not path.exists():
            return
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'out'").fetchone():
                yield from connection.execute("SELECT * FROM out").fetchall()

    def _files(self) -> Iterator[Hashable]:
        for path in committed_files(self.folder / "out"):
            table = pq.read_table(path, partitioning=None)
            yield from zip(*(column.to_pylist() for column in table.columns), strict=True)

    def decided(self, sink: str) -> list[int]:
        """How many rows each decided batch has for a sink, in order."""
        log = DecisionLog(FileStore(self.checkpoint / "semel"))
        decisions = [effective_committables(log.journal(batch)) or () for batch in log.batches()]
        return [c.rows for decision in decisions for c in decision if c.sink == f"{sink}_out"]

    def committed(self, sink: str = "") -> int:
        """How many inputs are visible; fails unless it is the first k, whole, once, and only decided batches."""
        visible, so_far, k = self.visible(sink), Counter[Hashable](), 0
        while so_far.total() < visible.total() and k < self.batches:
            so_far += self.expected[k]
            k += 1
        assert nothing_lost(so_far, visible) == []
        assert nothing_duplicated(so_far, visible) == []
        if self.setup.guarantee == "exactly-once" and not self.setup.checkpoint:
            whole_batches = list(accumulate(self.decided(sink or self.setup.sink), initial=0))
            assert visible.total() in whole_batches, f"{visible.total()} rows are visible, decided: {whole_batches}"
        return k

    def staged(self) -> list[str]:
        """What is staged and not committed."""
        folders = (self.folder / "out.db-semel", self.folder / "out" / "_semel" / "staging")
        return sorted(p.name for folder in folders if folder.is_dir() for p in folder.iterdir())
