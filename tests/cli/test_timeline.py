"""The picture and the plan of the demo: pure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from semel.demo.audit import wrong_totals
from semel.demo.game import Settings
from semel.demo.orders import make_orders, split
from semel.demo.plan import plan_kills
from semel.demo.shops import FolderShop
from semel.demo.side import Ended, Killed, Life, Story
from semel.demo.timeline import Lane, draw, scale_of
from semel.errors import ConfigError
from semel.failpoints import parse

SVG = "{http://www.w3.org/2000/svg}"


def story() -> Story:
    return Story(
        lives=[Life(0.0, 4.0, 9.0), Life(9.0, 13.0, 20.0)],
        batches=[
            Ended("orders", 0, "committed", 5.0, 6.0),
            Ended("orders", 1, "forwarded", 14.0, 14.1),
            Ended("totals", 0, "replayed", 14.0, 15.0),
        ],
        kills=[Killed(9.0, "batch.decided")],
    )


def test_the_picture_is_xml_with_one_mark_per_kill_and_one_bar_per_batch() -> None:
    root = ET.fromstring(draw([Lane("semel", "0 lost", story()), Lane("a <side>", "", Story())], seed=7))  # noqa: S314 - our own text
    lanes = {lane.get("data-side"): lane for lane in root.iter(f"{SVG}g") if lane.get("class") == "lane"}
    assert set(lanes) == {"semel", "a <side>"}
    classes = Counter(group.get("class") for group in lanes["semel"].iter(f"{SVG}g"))
    assert classes == {"lane": 1, "batch": 3, "kill": 1}
    kill = next(group for group in lanes["semel"].iter(f"{SVG}g") if group.get("class") == "kill")
    assert "batch.decided" in "".join(kill.itertext())
    hows = Counter(rect.get("class") for rect in lanes["semel"].iter(f"{SVG}rect"))
    assert hows == {"starting": 2, "running": 2, "committed": 1, "forwarded": 1, "replayed": 1}


def test_everything_that_is_drawn_lies_inside_the_picture() -> None:
    root = ET.fromstring(draw([Lane("semel", "", story())], seed=7))  # noqa: S314 - our own text
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.get("width", 0)) <= width
        assert 0 <= y <= y + float(rect.get("height", 0)) <= height


@pytest.mark.parametrize("seconds", [0.5, 9, 200, 3600])
def test_the_axis_has_few_ticks(seconds: float) -> None:
    assert 1 <= len(scale_of(seconds).ticks()) <= 15


def test_the_batches_that_were_handed_over_twice_are_counted() -> None:
    told = story()
    assert told.handed_twice == {("orders", 1), ("totals", 0)}
    told.begun[("orders", 7)] = 2
    assert ("orders", 7) in told.handed_twice


def test_the_same_seed_gives_the_same_orders_and_plan() -> None:
    assert (make_orders(3, 50), plan_kills(3, 12)) == (make_orders(3, 50), plan_kills(3, 12))
    assert plan_kills(3, 12) != plan_kills(4, 12)
    assert len({order.id for order in make_orders(3, 50)}) == 50


def test_half_of_the_kills_are_at_failpoints_that_exist() -> None:
    plan = plan_kills(5, 24)
    assert sum(bool(kill.point) for kill in plan) == 12
    for kill in plan:
        assert not kill.point or parse(kill.variable) == {kill.point: (kill.nth, "kill")}


def test_the_files_hold_every_order_once() -> None:
    orders = make_orders(1, 101)
    parts = split(orders, 8)
    assert [order for part in parts for order in part] == orders
    assert {len(part) for part in parts} == {12, 13}


def test_the_audit_of_nothing_is_not_a_pass(tmp_path: Path) -> None:
    verdict = FolderShop(tmp_path / "empty").audit(make_orders(1, 10))
    assert (verdict.produced, verdict.delivered, verdict.lost, verdict.duplicated) == (10, 0, 10, 0)
    assert verdict.aggregates_wrong > 0
    assert not verdict.exactly_once


def test_a_total_that_is_off_by_a_cent_is_found() -> None:
    (order,) = make_orders(1, 1)
    assert wrong_totals([order], [(order.customer, 1, order.cents)]) == []
    assert len(wrong_totals([order], [(order.customer, 1, order.cents + 1)])) == 1
    assert len(wrong_totals([order], [(order.customer, 1, order.cents), ("nobody", 1, 1)])) == 1


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few for 30 batches"):
        Settings(seed=1, orders=59)
    with pytest.raises(ConfigError, match="too few for 12 kills"):
        Settings(seed=1, batches=12)
