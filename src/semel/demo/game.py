"""Both sides at once, on the same orders and the same plan; then the audit."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from semel.demo import pipelines_path
from semel.demo.audit import Verdict, audit
from semel.demo.orders import Order, Producer, make_orders, split
from semel.demo.plan import plan_kills
from semel.demo.side import Side
from semel.demo.timeline import Lane, draw
from semel.errors import ConfigError, MissingExtra

FILES_PER_BATCH = 2
COMMITS_PER_BATCH = 4
#: Short lives gain nothing from an optimizing compiler and a parallel collector; two of them share the machine.
SPARK_CONF = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@dataclass(frozen=True)
class Settings:
    """What the command line says. `batches` is about how many batches the input makes, per pipeline."""

    seed: int
    kills: int = 12
    orders: int = 6000
    batches: int = 0
    output: Path = Path("demo-output")
    keep: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", self.batches or 4 * self.kills + 12)
        if self.orders < self.files:
            raise ConfigError(
                f"{self.orders} orders are too few for {self.batches} batches of {FILES_PER_BATCH} files.",
                remedy=f"Ask for at least {self.files} orders, or for fewer batches or kills.",
            )
        if self.batches <= self.kills:
            raise ConfigError(
                f"{self.batches} batches are too few for {self.kills} kills: each life needs a new one.",
                remedy=f"Ask for at least {self.kills + 1} batches, or leave --batches out.",
            )
        if importlib.util.find_spec("pyspark") is None:
            raise MissingExtra("The demo needs PySpark, which is not installed.", extra="spark")

    @property
    def files(self) -> int:
        return self.batches * FILES_PER_BATCH


@dataclass(frozen=True)
class Score:
    """How one side did."""

    produced: int
    delivered: int
    lost: int
    duplicated: int
    aggregates_wrong: int
    kills: int
    batches: int
    replayed: int


@dataclass(frozen=True)
class Result:
    seed: int
    kills_asked: int
    semel: Score
    baseline: Score
    seconds: float
    output: Path
    evidence: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Nothing lost, nothing twice, no total wrong; and the kills and the orders were really there."""
        s = self.semel
        return s.produced > 0 and s.lost == s.duplicated == s.aggregates_wrong == 0 and s.kills >= self.kills_asked

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            **asdict(self.semel),
            "baseline": asdict(self.baseline),
            "seconds": self.seconds,
            "output": str(self.output),
            "ok": self.ok,
            "evidence": list(self.evidence),
        }


def play(settings: Settings, watch: Callable[[Sequence[Side]], None]) -> Result:
    """Play both sides in threads while `watch` shows them, then audit. Interrupted, it leaves no child behind."""
    began = time.monotonic()
    output = settings.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"run-{settings.seed}-", dir=output))
    orders = make_orders(settings.seed, settings.orders)
    sides = make_sides(settings, orders, work, began)
    _play_all(sides, watch)
    verdicts = [audit(orders, side.database) for side in sides]
    semel, baseline = (score(side, verdict) for side, verdict in zip(sides, verdicts, strict=True))
    seconds = round(time.monotonic() - began, 1)
    result = Result(settings.seed, settings.kills, semel, baseline, seconds, output, verdicts[0].evidence)
    lanes = [Lane(side.name, caption(verdict), side.story) for side, verdict in zip(sides, verdicts, strict=True)]
    (output / "timeline.svg").write_text(draw(lanes, seed=settings.seed))
    (output / "result.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    if result.ok and not settings.keep:
        shutil.rmtree(work, ignore_errors=True)
    return result


def make_sides(settings: Settings, orders: Sequence[Order], work: Path, began: float) -> list[Side]:
    semel_run = [sys.executable, "-m", "semel.cli", "run", str(pipelines_path()), "--json"]
    for key, value in SPARK_CONF.items():
        semel_run += ["--conf", f"{key}={value}"]
    commands = {"semel": semel_run, "plain Spark": [sys.executable, "-m", "semel.demo.baseline"]}
    return [_side(name, command, settings, orders, work, began) for name, command in commands.items()]


def _side(
    name: str, command: Sequence[str], settings: Settings, orders: Sequence[Order], work: Path, began: float
) -> Side:
    folder = work / name.replace(" ", "-").lower()
    folder.mkdir()
    return Side(
        name,
        command,
        _variables(settings, folder),
        folder,
        folder / "shop.db",
        Producer(folder / "input", split(orders, settings.files)),
        plan_kills(settings.seed, settings.kills),
        began,
        has_failpoints=name == "semel",
    )


def _variables(settings: Settings, folder: Path) -> Mapping[str, str]:
    return {
        "SEMEL_DEMO_INPUT": str(folder / "input"),
        "SEMEL_DEMO_DATABASE": str(folder / "shop.db"),
        "SEMEL_DEMO_CHECKPOINTS": str(folder / "checkpoints"),
        "SEMEL_DEMO_FILES_PER_BATCH": str(FILES_PER_BATCH),
        "SEMEL_DEMO_ROWS_PER_COMMIT": str(max(1, settings.orders // settings.batches // COMMITS_PER_BATCH)),
        "SEMEL_DEMO_CONF": json.dumps({"spark.master": "local[*]", **SPARK_CONF}),
        "PYSPARK_PYTHON": sys.executable,
    }


def _play_all(sides: Sequence[Side], watch: Callable[[Sequence[Side]], None]) -> None:
    """Raises the first error of a side, after the other has been cancelled."""
    errors: list[BaseException] = []

    def one(side: Side) -> None:
        try:
            side.play()
        except BaseException as error:  # noqa: BLE001 - carried over to the main thread and raised there
            errors.append(error)
            cancel()

    def cancel() -> None:
        for side in sides:
            side.cancelled.set()

    threads = [threading.Thread(target=one, args=(side,), name=side.name) for side in sides]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            watch(sides)
            time.sleep(0.1)
    finally:
        cancel()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def score(side: Side, verdict: Verdict) -> Score:
    return Score(
        produced=verdict.produced,
        delivered=verdict.delivered,
        lost=verdict.lost,
        duplicated=verdict.duplicated,
        aggregates_wrong=verdict.aggregates_wrong,
        kills=len(side.story.kills),
        batches=len(side.story.batch_ids),
        replayed=len(side.story.handed_twice),
    )


def caption(verdict: Verdict) -> str:
    return f"{verdict.lost} lost, {verdict.duplicated} twice"
