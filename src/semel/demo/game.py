"""Both sides at once, on the same orders and killed equally often; then the audit."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from semel.demo.audit import Verdict
from semel.demo.kafka_shop import kafka_scene
from semel.demo.orders import Order, Producer, make_orders, split
from semel.demo.plan import plan_kills
from semel.demo.shops import EMBEDDED, Scene, Shop
from semel.demo.side import Side
from semel.demo.timeline import Lane, draw
from semel.demo.warmup import demo_variables, run_command, spark_conf, warm_up
from semel.errors import ConfigError, MissingExtra
from semel.session.local_files import MASTER, with_local_files

_LOG = logging.getLogger("semel")

MASTER_OF_BOTH = "local[*]"
FILES_PER_BATCH = 2
COMMITS_PER_BATCH = 4


@dataclass(frozen=True)
class Settings:
    """What the command line says. `batches` is about how many batches the input makes, per pipeline."""

    seed: int
    kills: int = 12
    orders: int = 6000
    batches: int = 0
    output: Path = Path("demo-output")
    keep: bool = False
    on_kafka: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", self.batches or 2 * self.kills + 6)
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
    try:
        sides, verdicts = _play_in(work, settings, orders, watch)
    except KeyboardInterrupt:
        shutil.rmtree(work, ignore_errors=True)
        raise
    semel, baseline = (score(side, verdict) for side, verdict in zip(sides, verdicts, strict=True))
    seconds = round(time.monotonic() - began, 1)
    result = Result(settings.seed, settings.kills, semel, baseline, seconds, output, verdicts[0].evidence)
    lanes = [Lane(side.name, caption(verdict), side.story) for side, verdict in zip(sides, verdicts, strict=True)]
    (output / "timeline.svg").write_text(draw(lanes, seed=settings.seed))
    (output / "result.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    if result.ok and not settings.keep:
        shutil.rmtree(work, ignore_errors=True)
    return result


def _play_in(
    work: Path, settings: Settings, orders: Sequence[Order], watch: Callable[[Sequence[Side]], None]
) -> tuple[list[Side], list[Verdict]]:
    scene = kafka_scene() if settings.on_kafka else EMBEDDED
    # Plain Spark gets them, too: what is compared is what is lost, and not the files.
    conf = with_local_files({MASTER: MASTER_OF_BOTH, **scene.conf}, say=_LOG.warning)
    scene = replace(scene, conf=conf)
    archive = work / "spark-classes.jsa"
    watch(())
    with scene.open(work) as open_shop:
        _warm_up(work, archive, scene, open_shop)
        conf = {**spark_conf(archive), **scene.conf}
        sides = make_sides(settings, orders, work, conf, scene, open_shop)
        try:
            _play_all(sides, watch)
            return sides, [side.shop.audit(orders) for side in sides]
        finally:
            for side in sides:
                side.shop.close()


def _warm_up(work: Path, archive: Path, scene: Scene, open_shop: Callable[[Path], Shop]) -> None:
    folder = _made(work / "warm-up")
    shop = open_shop(folder)
    try:
        warm_up(folder, archive, scene, shop)
    finally:
        shop.close()


def make_sides(
    settings: Settings,
    orders: Sequence[Order],
    work: Path,
    conf: Mapping[str, str],
    scene: Scene,
    open_shop: Callable[[Path], Shop],
) -> list[Side]:
    """The same orders, the same plan, the same Spark settings."""
    commands = {
        "semel": run_command(scene.pipelines, conf),
        "plain Spark": [sys.executable, "-m", scene.baseline],
    }
    began = time.monotonic()
    return [
        Side(
            name,
            command,
            _variables(settings, folder, conf, shop),
            folder,
            shop,
            Producer(shop.write, split(orders, settings.files)),
            plan_kills(settings.seed, settings.kills, scene.store),
            began,
            has_failpoints=name == "semel",
        )
        for name, command in commands.items()
        for folder in [_made(work / name.replace(" ", "-").lower())]
        for shop in [open_shop(folder)]
    ]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _variables(settings: Settings, folder: Path, conf: Mapping[str, str], shop: Shop) -> dict[str, str]:
    rows_per_batch = max(1, settings.orders // settings.batches)
    return {
        **demo_variables(folder, shop),
        "SEMEL_DEMO_FILES_PER_BATCH": str(FILES_PER_BATCH),
        "SEMEL_DEMO_ROWS_PER_BATCH": str(rows_per_batch),
        "SEMEL_DEMO_ROWS_PER_COMMIT": str(max(1, rows_per_batch // COMMITS_PER_BATCH)),
        "SEMEL_DEMO_CONF": json.dumps(conf),
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
