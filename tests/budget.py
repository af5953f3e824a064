"""What took how long, and why: told at the end of each run. The budget is in tests/README.md.

A test is slow because of the processes that it starts, above all lives of Spark; so these are counted, test by test.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

#: Slower than this is worth a line.
SLOW_S = 20.0
LINES_MAX = 40
WHY, WHERE = "why it is slow", "where its files and logs are"
#: What the command line of a process has in it -> what it is. The first that fits counts.
KINDS = (
    ("tests/e2e/child.py", "lives of Spark"),
    ("semel.verify.child", "lives of Spark"),
    ("semel.cli", "semel commands"),
    ("spark-submit", "lives of Spark"),
    ("kafka.Kafka", "Kafka brokers"),
    ("MiniDFSCluster", "HDFS clusters"),
    ("mariadbd", "MariaDB servers"),
    ("bin/postgres", "PostgreSQL servers"),
    ("python", "other Pythons"),
)

_started: Counter[str] = Counter()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """CPython tells of every process that is started."""
    if event != "subprocess.Popen":
        return
    given = arguments[1]
    command = given if isinstance(given, str | bytes) else " ".join(map(str, given))
    kind = next((kind for sign, kind in KINDS if sign in str(command)), "")
    if kind:
        _started[kind] += 1


sys.addaudithook(_heard)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties.append((WHY, ", ".join(f"{kind}: {n}" for kind, n in _started.most_common())))
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed:
        base = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        report.sections.append((WHERE, f"{folder or 'it has no folder of its own'}\nservers that tests share: {base}"))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """By folder, then the slow tests."""
    seconds: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    why: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # seconds are no whole numbers
                folders[str(Path(report.nodeid.partition("::")[0]).parent)] += report.duration  # type: ignore[assignment]
                told = [str(value) for name, value in report.user_properties if name == WHY and value]
                why[report.nodeid] = max([why.get(report.nodeid, ""), *told], key=len)
    slow = [(name, s) for name, s in seconds.most_common(LINES_MAX) if s >= SLOW_S]
    if not slow:
        return
    terminalreporter.section(f"what took how long: {sum(seconds.values()):.0f} s of work")
    terminalreporter.write_line(", ".join(f"{name} {s:.0f} s" for name, s in folders.most_common() if s >= 1))
    for name, s in slow:
        terminalreporter.write_line(f"{s:6.0f} s  {name}: {why[name] or 'no process of its own'}")
