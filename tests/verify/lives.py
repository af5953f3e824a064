"""What the tests of lives and of the nemesis share: input, lives of a small pipeline, and what is in its table."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from semel.demo.warmup import spark_conf
from semel.verify.life import Life, begin_life
from semel.verify.plan import Fault
from tests.quick_spark import quick_conf

PIPELINES = Path(__file__).parent / "pipelines"
ROWS_PER_FILE = 10


@dataclass
class Lives:
    """Lives of one pipeline over one checkpoint."""

    folder: Path
    target: str = f"{PIPELINES / 'orders.py'}"
    variables: Mapping[str, str] = field(default_factory=dict)
    fed: int = 0
    lives: list[Life] = field(default_factory=list)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def conf(self) -> dict[str, str]:
        return {**spark_conf(self.folder / "no-archive"), **quick_conf()}

    @property
    def environment(self) -> dict[str, str]:
        return {"SEMEL_VERIFY_FOLDER": str(self.folder), **self.variables}

    def feed(self, files: int) -> None:
        """Each file is one batch; it appears whole."""
        place = self.folder / "in"
        place.mkdir(exist_ok=True)
        for _ in range(files):
            lines = [json.dumps({"id": n, "key": f"k{n % 7}"}) for n in range(self.fed, self.fed + ROWS_PER_FILE)]
            aside = self.folder / "next"
            aside.write_text("\n".join(lines))
            aside.rename(place / f"{self.fed:08d}.json")
            self.fed += ROWS_PER_FILE

    def start(self, fault: Fault | None = None) -> Life:
        number = len(self.lives) + 1
        life = begin_life(
            self.target,
            self.checkpoint,
            conf=self.conf,
            variables=self.environment,
            log=self.folder / f"life-{number}.log",
            fault=fault,
            number=number,
        )
        self.lives.append(life)
        return life

    def fed_ahead(self, batches: int) -> Callable[[Fault | None], Life]:
        """Starts lives that find so many batches of input more than the one before."""

        def start(fault: Fault | None) -> Life:
            self.feed(batches if fault else 1)
            return self.start(fault)

        return start

    def rows(self) -> Counter[int]:
        path = self.folder / "out.db"
        if not path.exists():
            return Counter()
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
            known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'orders'").fetchall()
            return Counter(row[0] for row in connection.execute("SELECT id FROM orders")) if known else Counter()

    @property
    def all_rows(self) -> Counter[int]:
        return Counter(range(self.fed))

    def end(self) -> None:
        for life in self.lives:
            life.kill()
