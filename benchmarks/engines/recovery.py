"""How long readers see nothing when an engine is killed with SIGKILL and started again at once, as a supervisor would.

`first_row_s` is from the last row before the kill to the first one after it. That may be a row of a batch that was
decided before; `new_row_s` is from the same moment to the first row that was sent after the kill. `jvm_s` is the part
in which the new process, its JVM or its interpreter and its session came up.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines.launch import Running, Say, running
from benchmarks.engines.talk import SESSION, STARTED, Job
from benchmarks.reader import Reader, Seen, WrongRows, reading
from benchmarks.rows import fed
from benchmarks.topics import Topics

#: After the first row.
WARM_S = 15.0
CALM_S = (3.0, 6.0)
RECOVERY_S_MAX = 180.0
#: Spark's own sink writes the batch again in which it was killed.
AT_LEAST_ONCE = ("spark",)


def recoveries(engine: str, topics: Topics, folder: Path, say: Say, **asked: Any) -> dict[str, Any]:
    """`asked` are rate, rounds, commit_ms and seed."""
    source, target = topics.make("recovery-in"), topics.make("recovery-out")
    job = Job(
        engine, topics.servers, source, [target], str(folder / f"recovery-{engine}"), commit_ms=asked["commit_ms"]
    )
    chance = random.Random(asked["seed"])  # noqa: S311 - when to kill, not a secret
    kills: list[tuple[int, Running]] = []
    with ExitStack() as stack:
        reader = stack.enter_context(reading(topics.servers, [target]))
        process = stack.enter_context(running(job, say=say))
        feeder = stack.enter_context(fed(topics.servers, source, asked["rate"]))
        _wait_until_current(reader, process)
        time.sleep(WARM_S)
        for _ in range(asked["rounds"]):
            time.sleep(chance.uniform(*CALM_S))
            killed_ns = int(process.kill() * 1e9)
            process = stack.enter_context(running(job, say=say))
            kills.append((killed_ns, process))
            _wait_until_current(reader, process)
        rows = feeder.stop()
        reader.wait_for(rows, RECOVERY_S_MAX)
        process.stop()
        seen = reader.finish()[target]
    topics.drop(source, target)
    doubled = _require(engine, seen, rows)
    return {**_figures([_gap(seen, *kill) for kill in kills]), "kills": len(kills), "rows": rows, "doubled": doubled}


def _wait_until_current(reader: Reader, process: Running) -> None:
    """Until rows come that were sent after the new process began."""
    deadline = time.monotonic() + RECOVERY_S_MAX
    while reader.newest_sent_ns() < process.began * 1e9:
        process.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.name} showed no new row within {RECOVERY_S_MAX:.0f} s")
        time.sleep(0.1)


def _require(engine: str, seen: Seen, rows: int) -> int:
    if engine not in AT_LEAST_ONCE:
        seen.require_each_once(engine, rows)
    elif lost := seen.lost(rows):
        raise WrongRows(f"{engine}: of {rows:,} rows {lost:,} were lost, {seen.doubled():,} came twice")
    return seen.doubled()


def _gap(seen: Seen, killed_ns: int, process: Running) -> dict[str, float]:
    began_ns = process.began * 1e9
    before = int(seen.seen_ns[seen.seen_ns < began_ns].max())
    after = int(seen.seen_ns[seen.seen_ns >= began_ns].min())
    new = int(seen.seen_ns[seen.sent_ns > killed_ns].min())
    jvm_s = process.events[SESSION]["at"] - process.began
    return {
        "first_row_s": (after - before) / 1e9,
        "new_row_s": (new - before) / 1e9,
        "jvm_s": jvm_s,
        "new_row_without_jvm_s": (new - before) / 1e9 - jvm_s,
        "started_s": process.events[STARTED]["at"] - process.began,
    }


def _figures(gaps: list[dict[str, float]]) -> dict[str, float]:
    medians = {name: round(statistics.median(gap[name] for gap in gaps), 2) for name in gaps[0]}
    return {**medians, "new_row_s_max": round(max(gap["new_row_s"] for gap in gaps), 2)}
