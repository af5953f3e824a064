"""How the demo starts Spark two dozen times in three minutes.

Most of a start is the JVM reading and checking the same few thousand classes. One clean run before the game lets it
keep them in an archive (class data sharing, JEP 350), which halves what each later start costs. Both sides use it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from semel.demo.child import Child
from semel.demo.orders import Producer, make_orders, split
from semel.demo.shops import Scene, Shop
from semel.run.session import LOOPBACK

FILES = 4
WITHIN_S = 120.0
DUMP_WITHIN_S = 60.0


def spark_conf(archive: Path, *, dump: bool = False) -> dict[str, str]:
    """Settings for short lives on small batches: no optimizing compiler, no parallel collector, no generated code."""
    classes = f"-XX:ArchiveClassesAtExit={archive}" if dump else f"-XX:SharedArchiveFile={archive}"
    return {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        + (f" {classes}" if dump or archive.exists() else ""),
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **LOOPBACK,
    }


def run_command(pipelines: Path, conf: Mapping[str, str]) -> list[str]:
    """`semel run` of the demo's pipeline file."""
    settings = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    return [sys.executable, "-m", "semel.cli", "run", str(pipelines), "--json", *settings]


def demo_variables(folder: Path, shop: Shop) -> dict[str, str]:
    """Where the pipelines read and write."""
    return {
        **shop.variables,
        "SEMEL_DEMO_CHECKPOINTS": str(folder / "checkpoints"),
        "PYSPARK_PYTHON": sys.executable,
    }


def warm_up(folder: Path, archive: Path, scene: Scene, shop: Shop) -> None:
    """Two batches of each pipeline, a clean stop, and the archive is there; without it all works, only slower."""
    producer = Producer(shop.write, split(make_orders(0, FILES), FILES))
    producer.write_all()
    command = run_command(scene.pipelines, {**spark_conf(archive, dump=True), **scene.conf})
    variables = {**demo_variables(folder, shop), "SEMEL_DEMO_ROWS_PER_BATCH": "1"}
    child = Child(command, variables, folder, folder / "log")
    try:
        heard = 0
        while heard < FILES and not child.ended:
            event = child.next_event(WITHIN_S)
            if event is None:
                break
            heard += event["event"] == "batch"
        child.stop(WITHIN_S, gone_within_s=DUMP_WITHIN_S)
    finally:
        child.kill()
    with suppress(OSError):
        if archive.stat().st_size == 0:
            archive.unlink()
