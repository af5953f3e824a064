"""What is done to lives, on a real pipeline with real Spark: it dies, it gives up, and its data is right."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semel.verify.history import Event
from semel.verify.nemesis import ACTS, Broken, Nemesis
from semel.verify.plan import KINDS, Fault
from semel.verify.servers import start_servers
from tests.verify.lives import PIPELINES, Lives

BATCHES = 6


class Scene:
    """A pipeline, its nemesis, and what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.lives = Lives(folder)
        self.events: list[Event] = []
        self.nemesis = Nemesis(self.lives.fed_ahead(BATCHES), {}, None, print, self.events.append)

    def drain(self) -> None:
        self.nemesis.drain(lambda: self.lives.rows() == self.lives.all_rows, 240)
        assert self.lives.rows() == self.lives.all_rows

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def end(self) -> None:
        self.nemesis.end()
        self.lives.end()


@pytest.fixture
def scene(tmp_path: Path, class_archive: None) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.end()


@dataclass
class Told:
    """A life that somebody else has ended, as the nemesis finds it: no process, no Spark."""

    killed: bool
    error: str = ""
    fenced: bool = False
    number: int = 1
    batches: int = 1
    ended: bool = True
    stopped: bool = False
    began_s: float = 0.0
    told: tuple[object, ...] = ()

    error_kind = ""

    @property
    def reason(self) -> str:
        return self.error or "it said nothing; exit code -9"

    def wait(self, true: Callable[[], bool], seconds_max: float) -> bool:
        assert seconds_max >= 0
        return true()

    def join(self) -> bool:
        return self.killed

    def members(self, role: str = "") -> list[int]:
        assert role in ("", "jvm", "worker", "executor", "python")
        return []

    def signal(self, number: object, role: str = "") -> int:
        pytest.fail(f"{number} to {role or 'everybody'} of a life that is over")

    def kill(self) -> bool:
        return self.killed


def _nemesis(life: Any) -> Nemesis:
    return Nemesis(lambda _: life, {}, None, print, lambda _: None)


@pytest.mark.parametrize("kind", ["driver", "supervisor", "jvm", "worker", "pause"])
def test_a_life_that_somebody_else_killed_is_none_of_our_kills(kind: str) -> None:
    """The kernel does so when memory is short. Then nothing is known of what would have come."""
    nemesis = _nemesis(Told(killed=True))
    with pytest.raises(Broken, match="life 1 was killed, and not by this run"):
        nemesis.suffer(Fault(kind, delay_s=0.1))
    assert (nemesis.kills, nemesis.faults) == (0, {})


@pytest.mark.parametrize("kind", ["driver", "supervisor", "jvm", "pause"])
def test_a_life_that_an_earlier_driver_fenced_has_not_suffered_its_fault(kind: str) -> None:
    nemesis = _nemesis(Told(killed=False, error="Fenced", fenced=True))
    nemesis.orphans.append(Told(killed=False))  # type: ignore[arg-type]
    nemesis._bury_orphans = lambda: None  # type: ignore[method-assign]
    assert nemesis.suffer(Fault(kind, delay_s=0.1)).startswith("gave up")
    assert (nemesis.kills, nemesis.faults) == (0, {})


def test_a_life_that_dies_at_its_point_is_one_kill() -> None:
    nemesis = _nemesis(Told(killed=True))
    assert nemesis.suffer(Fault("point", "batch.decided", 2)) == "killed"
    assert (nemesis.kills, nemesis.faults) == (1, {"point": 1})


class GoesOn(Told):
    """Its next batch ends whenever somebody waits for it. It takes signals."""

    def wait(self, true: Callable[[], bool], seconds_max: float) -> bool:
        self.batches += 1
        return super().wait(true, seconds_max)

    def signal(self, number: object, role: str = "") -> int:
        assert (number, role) == (signal.SIGCONT, "")
        return 1


def test_zombies_wake_up_in_a_life_that_was_stopped_between_two_steps_once_it_goes_on() -> None:
    """A plan of zombies and of such lives alone would pile them up otherwise, each with its JVM."""
    nemesis = _nemesis(None)
    zombie = GoesOn(killed=False, error="Fenced", fenced=True)
    nemesis.zombies.append(zombie)  # type: ignore[arg-type]
    life: Any = GoesOn(killed=True, ended=False)
    assert nemesis._kill_when_it_goes_on(life, Fault("between", "batch.decided", 2, server="kafka")) == "killed"
    assert nemesis.zombies == []


def test_every_kind_of_fault_can_be_suffered() -> None:
    assert list(ACTS) == list(KINDS)


@pytest.mark.long
def test_a_pipeline_that_is_killed_in_every_way_writes_each_row_once(scene: Scene) -> None:
    faults = {
        Fault("point", "batch.decided", 2): "killed",
        Fault("point", "task.prepared", 2): "a task killed",
        Fault("supervisor", delay_s=0.2): "killed, ",
        Fault("driver", delay_s=0.3): "killed",
        Fault("pause", delay_s=0.1, pause_s=0.5): "killed",
    }
    outcomes = {fault: scene.nemesis.suffer(fault) for fault in faults}
    for fault, expected in faults.items():
        assert outcomes[fault].startswith(expected), outcomes
    assert scene.nemesis.kills == 5
    assert scene.nemesis.faults == Counter(fault.kind for fault in faults)
    scene.drain()
    assert len(scene.of_kind("life")) == 6
    assert all(event.until_s > event.at_s for event in scene.of_kind("life"))
    # What the first two lives left was committed forward, or run again.
    assert len(scene.of_kind("recovery")) >= 2
    assert [life.members() for life in scene.lives.lives] == [[]] * 6


@pytest.mark.long
def test_a_pipeline_that_loses_a_part_gives_up_or_goes_on_and_writes_each_row_once(scene: Scene) -> None:
    for kind in ("jvm", "worker"):
        outcome = scene.nemesis.suffer(Fault(kind, delay_s=0.2))
        assert outcome.startswith((f"its {kind} killed, killed", f"its {kind} killed, gave up (")), outcome
    assert scene.nemesis.faults == {"jvm": 1, "worker": 1}
    assert scene.nemesis.kills >= 2
    scene.drain()


@pytest.mark.long
def test_a_zombie_wakes_up_in_the_next_life_and_is_fenced(scene: Scene) -> None:
    assert scene.nemesis.suffer(Fault("zombie", "batch.staged", 2)) == "stopped"
    zombie = scene.lives.lives[0]
    assert zombie.stopped
    assert scene.nemesis.suffer(Fault("driver", delay_s=0.1)) in ("killed", "gave up (Fenced)", "gave up (SemelError)")
    assert zombie.fenced
    assert scene.nemesis.zombies == []
    assert [event.what for event in scene.of_kind("note")] == ["life 1 woke up as a zombie and was fenced"]
    scene.drain()


@pytest.mark.long
def test_a_zombie_that_is_left_at_the_end_wakes_up_in_the_last_life(scene: Scene) -> None:
    scene.nemesis.suffer(Fault("zombie", "batch.committed", 2))
    scene.drain()
    assert scene.lives.lives[0].fenced
    assert scene.nemesis.zombies == []


@pytest.mark.long
def test_a_pipeline_whose_server_is_killed_or_out_of_reach_writes_each_row_once(scene: Scene, tmp_path: Path) -> None:
    with start_servers(["postgres"], tmp_path / "servers", print) as servers:
        scene.nemesis.servers = servers
        scene.lives.target = str(PIPELINES / "orders_postgres.py")
        scene.lives.variables = servers["postgres"].variables
        faults = [
            Fault("server", delay_s=0.2, pause_s=1.0, server="postgres"),
            Fault("between", "batch.decided", 2, server="postgres"),
            Fault("cut", delay_s=0.1, pause_s=2.0, server="postgres"),
            Fault("delay", delay_s=0.1, pause_s=2.0, server="postgres", chunk_s=0.2),
        ]
        outcomes = [scene.nemesis.suffer(fault) for fault in faults]
        assert all(words == "killed" or words.startswith("gave up (") for words in outcomes), outcomes
        url = servers["postgres"].url
        scene.nemesis.drain(lambda: _rows(url) == scene.lives.all_rows, 240)
        assert _rows(url) == scene.lives.all_rows
    assert scene.nemesis.faults == Counter(fault.kind for fault in faults)
    # Two times the server, and each life that went on.
    assert scene.nemesis.kills == 2 + outcomes.count("killed")
    assert [event.lane for event in scene.of_kind("outage")] == ["postgres"] * 4


def _rows(url: str) -> Counter[int]:
    import psycopg

    with psycopg.connect(url, connect_timeout=5) as connection:
        known = connection.execute("SELECT to_regclass('orders')").fetchall() != [(None,)]
        return Counter(row[0] for row in connection.execute("SELECT id FROM orders")) if known else Counter()


def test_a_point_that_is_never_reached_is_a_moment_like_any(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.verify.nemesis.POINT_S_MAX", 1.0)
    assert scene.nemesis.suffer(Fault("point", "kafka.marked")) == "never at kafka.marked, killed"
    assert scene.nemesis.faults == {"driver": 1}
    assert scene.nemesis.kills == 1


def test_a_pipeline_that_fails_by_itself_is_broken_and_says_why(scene: Scene) -> None:
    scene.lives.target = f"{PIPELINES / 'several.py'}:failing"
    with pytest.raises(Broken, match=r"life 1 ended by itself[\s\S]*row 3 is bad"):
        scene.nemesis.suffer(Fault("driver", delay_s=30.0))
    assert scene.nemesis.kills == 0
