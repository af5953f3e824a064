"""Where a side of the game reads and writes. The embedded one: a folder of files, and one SQLite database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from semel.demo.audit import Verdict, audit
from semel.demo.orders import Order


class Shop(Protocol):
    """One side's input and output, seen from outside: as whoever produces orders, and as whoever reads the result."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of the pipelines."""

    def write(self, number: int, orders: Sequence[Order]) -> None:
        """Some more input. It appears whole."""

    def delivered(self) -> int:
        """How many different orders have arrived so far."""

    def arrived(self, orders: int) -> bool:
        """Whether so many orders are there, and counted in the totals."""

    def audit(self, orders: Sequence[Order]) -> Verdict: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Scene:
    """What the two sides play on. `store` begins the names of its own failpoints; `open` makes shops."""

    store: str
    pipelines: Path
    baseline: str
    open: Callable[[Path], Any]
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FolderShop:
    folder: Path

    def __post_init__(self) -> None:
        self.database = self.folder / "shop.db"
        self.input = self.folder / "input"
        self.input.mkdir(parents=True)

    @property
    def variables(self) -> Mapping[str, str]:
        return {"SEMEL_DEMO_INPUT": str(self.input), "SEMEL_DEMO_DATABASE": str(self.database)}

    def write(self, number: int, orders: Sequence[Order]) -> None:
        """Spark passes over names that begin with a dot."""
        target = self.input / f"{number:05d}.json"
        hidden = target.with_name(f".{target.name}")
        hidden.write_text("".join(json.dumps(asdict(order)) + "\n" for order in orders))
        hidden.rename(target)

    def delivered(self) -> int:
        return self._count("SELECT count(DISTINCT id) FROM orders")

    def arrived(self, orders: int) -> bool:
        return self._count("SELECT coalesce(sum(orders), 0) FROM totals") == orders == self.delivered()

    def audit(self, orders: Sequence[Order]) -> Verdict:
        rows = self._rows("SELECT id, customer, cents, item, at FROM orders")
        return audit(orders, rows, self._rows("SELECT customer, orders, cents FROM totals"))

    def close(self) -> None:
        """Nothing is open."""

    def _count(self, query: str) -> int:
        return int(next(iter(self._rows(query)), (0,))[0])

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        """A table that does not exist yet has no rows."""
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=60)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                raise


@contextmanager
def _folders(_: Path) -> Iterator[Callable[[Path], Shop]]:
    yield FolderShop


EMBEDDED = Scene("sqlite", Path(__file__).with_name("pipelines.py"), "semel.demo.baseline", _folders)
