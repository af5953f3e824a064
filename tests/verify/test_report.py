"""The three files of a report: what they say, that they are well-formed, and that text of others stays text."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from semel.verify.anomalies import NAMES
from semel.verify.audit import audit
from semel.verify.history import KINDS, Event, History
from semel.verify.report import as_json, junit, write_report
from semel.verify.report_html import MEANINGS, page
from semel.verify.timeline import WIDTH_MAX, draw
from tests.verify.histories import at, eventful, eventful_and_wrong, good, look, with_looks, with_sink

KEYS = [
    *["verdict", "seed", "rows", "batches", "kills", "faults"],
    *["lost", "duplicated", "torn", "split", "early", "reordered", "orphans", "seconds"],
    *["pipeline", "guarantee", "compared", "reasons", "evidence", "proven", "not_proven", "replay"],
]
VOID = {"meta", "br"}
EVIL = "<script>alert('x')</script>&\"'"
PAGE_BYTES_MAX = 1_500_000
ELEMENTS_MAX = 12_000


class Checked(HTMLParser):
    """Reads a page, requires that every element is closed, and keeps what a test asks for."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(history: History) -> Checked:
    return Checked(page(history, audit(history), Path("output")))


def cases(history: History) -> dict[tuple[str, str], Any]:
    """Of each case of the JUnit file: what is inside."""
    suite = ElementTree.fromstring(junit(history, audit(history), 1.5))  # noqa: S314 - our own
    return {
        (case.get("classname", ""), case.get("name", "")): next(iter(case), None) for case in suite.iter("testcase")
    }


def unread() -> History:
    return with_sink(good(), "pg", error="connection refused", rows=Counter(), looks=())


# JSON -----------------------------------------------------------------------------------------------------------------


def test_the_object_has_these_keys_in_this_order() -> None:
    history = eventful()
    body = as_json(history, audit(history), 12.5)
    assert list(body) == KEYS
    assert json.loads(json.dumps(body)) == body
    assert (body["verdict"], body["seconds"], body["rows"]) == (True, 12.5, history.rows)
    assert body["faults"] == dict(sorted(history.faults.items()))


def test_the_object_has_counts_and_evidence_with_times() -> None:
    history = eventful_and_wrong()
    body = as_json(history, audit(history), 1.0)
    assert (body["verdict"], body["lost"], body["duplicated"], body["orphans"]) == (False, 100, 4, 1)
    moment = next(e for e in body["evidence"] if e["kind"] == "duplicated" and e["at_s"])
    assert (moment["sink"], moment["at_s"]) == ("postgres_billed", 50.0)


def test_an_unknown_verdict_is_a_word_with_reasons() -> None:
    body = as_json(unread(), audit(unread()), 1.0)
    assert body["verdict"] == "unknown"
    assert body["reasons"] == ["pg could not be read at the end: connection refused"]


# Files ----------------------------------------------------------------------------------------------------------------


def test_three_files_are_written_and_written_again(tmp_path: Path) -> None:
    history = eventful(lives=3, per_batch=5)
    for _ in range(2):
        path = write_report(tmp_path / "new" / "output", history, audit(history))
    assert path == tmp_path / "new" / "output" / "report.html"
    assert sorted(p.name for p in path.parent.iterdir()) == ["junit.xml", "report.html", "result.json"]
    assert json.loads((path.parent / "result.json").read_text())["seed"] == history.seed


# JUnit ----------------------------------------------------------------------------------------------------------------


def test_there_is_a_case_for_the_run_and_one_per_sink_and_property() -> None:
    found = cases(good())
    assert len(found) == 1 + 2 * len(NAMES)
    assert found["orders.topic", "no row is lost"] is None
    assert found["orders.pg", "no key is reordered"].tag == "skipped"
    assert "keeps no order" in found["orders.pg", "no key is reordered"].get("message")


def test_a_failure_has_the_count_and_the_evidence() -> None:
    found = cases(eventful_and_wrong())["billing.files_lake", "no row is lost"]
    assert found.tag == "failure"
    assert found.get("message") == "100 lost: row 6000 is missing 1 time(s) (batch 60)"
    assert found.text.splitlines()[-1] == "..."


def test_what_is_unknown_is_an_error() -> None:
    found = cases(unread())
    assert found["orders", "the run compared what it was asked to"].tag == "error"
    assert {case.tag for (name, _), case in found.items() if name == "orders.pg"} == {"error"}
    suite = ElementTree.fromstring(junit(unread(), audit(unread()), 1.5))  # noqa: S314 - our own
    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "15", "failures": "0", "errors": "8", "skipped": "1"}


def test_control_characters_do_not_break_the_xml() -> None:
    found = cases(with_sink(good(), "pg", left=["table \x00\x1b[31m \ud800"]))
    assert found["orders.pg", "nothing is left behind"].text == "table ??[31m ?"


# The page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [eventful, eventful_and_wrong, unread, good])
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(made: Any) -> None:
    found = read(made())
    assert {"script", "link", "img", "iframe"} & set(found.elements) == set()
    assert [v for _, name, v in found.attributes if name in ("src", "onclick", "xlink:href")] == []
    assert [v for _, name, v in found.attributes if name == "href" and ("://" in v or v.startswith("/"))] == []
    css = page(made(), audit(made()), Path("output")).split("</style>")[0]
    assert "@import" not in css
    assert "url(" not in css
    assert "prefers-color-scheme: dark" in css


@pytest.mark.parametrize(("made", "verdict"), [(eventful, True), (eventful_and_wrong, False), (unread, "unknown")])
def test_the_verdict_and_its_meaning_come_first(made: Any, verdict: Any) -> None:
    text = read(made()).text
    assert text.index(str(verdict).capitalize()) < text.index("What was found")
    assert MEANINGS[verdict] in text


def test_the_page_says_how_to_play_it_again_and_what_is_proven() -> None:
    history = eventful()
    result, text = audit(history), read(history).text
    assert history.replay in text
    assert all(sentence in text for sentence in [*result.proven, *result.not_proven])


def test_the_table_tells_zero_from_not_looked_for() -> None:
    html = page(good(), audit(good()), Path("output"))
    row = re.findall(r"<tr><th scope=\"row\">pg .*?</tr>", html)[0]
    cells = re.findall(r'<td class="number (good|bad|none)"', row)
    assert cells == ["good"] * 5 + ["none", "good"]
    assert 'title="the store keeps no order' in row


def test_tables_have_headers_and_pictures_have_names() -> None:
    found = read(eventful())
    assert found.elements["th"] > 0
    assert all(("th", "scope", scope) in found.attributes for scope in ("col", "row"))
    assert [v for tag, name, v in found.attributes if (tag, name, v) == ("svg", "role", "img")] == ["img"]
    assert ("html", "lang", "en") in found.attributes


def test_text_of_others_is_escaped_everywhere() -> None:
    history = with_sink(good(), "pg", left=[EVIL], strangers=[EVIL, EVIL + "2"], sink=EVIL, kind=EVIL)
    history = with_sink(history, "topic", error=EVIL)
    events = [Event(at(n), kind, lane, EVIL, at(n + 1)) for n, kind in enumerate(KINDS) for lane in ("pipeline", EVIL)]
    history = replace(
        history, pipeline=EVIL, replay=EVIL, faults={EVIL: 1}, logs=[EVIL], broken=EVIL, events=events, guarantee=EVIL
    )
    found = read(history)
    assert found.elements["script"] == 0
    assert EVIL in found.text
    assert any(EVIL in title for title in found.titles)


def test_logs_are_linked_from_where_the_page_lies(tmp_path: Path) -> None:
    inside = tmp_path / "output" / "run-7" / "logs" / "life-0001.log"
    history = good(logs=[str(inside)])
    html = page(history, audit(history), tmp_path / "output")
    assert 'href="run-7/logs/life-0001.log"' in html
    assert str(tmp_path) not in html


# The timeline ---------------------------------------------------------------------------------------------------------


def picture(history: History) -> Checked:
    result = audit(history)
    return Checked(draw(history, result.seen, result.anomalies))


def test_every_life_fault_outage_and_recovery_is_in_the_picture() -> None:
    history = eventful(lives=12, per_batch=5)
    titles = picture(history).titles
    wanted = [e for e in history.events if e.kind in ("life", "fault", "outage", "recovery", "batch")]
    assert len(wanted) > 50
    assert all(any(event.what in title for title in titles) for event in wanted)


def test_every_batch_is_in_the_lane_of_every_sink() -> None:
    history = good(rows=40, per_batch=10)
    titles = picture(history).titles
    for batch in range(4):
        assert f"batch {batch} first seen at {batch + 0.6:.1f} s" in titles


def test_recoveries_are_in_the_lane_of_every_sink_with_when_it_showed_the_batch() -> None:
    """One sink had it before the driver died, the other got it from the next one."""
    events = [
        Event(at(1.5), "fault", "pipeline", "point at sqlite.committed@1"),
        Event(at(1.56), "recovery", "pipeline", "batch 1 forwarded, 10 rows", at(1.61), batch=1),
    ]
    history = good(rows=40, per_batch=10, events=events)
    history = with_looks(history, "topic", look(1.52, range(10, 20)))
    titles = picture(history).titles
    assert "batch 1 forwarded, 10 rows, at 1.6 s; first seen here at 1.6 s" in titles
    assert "batch 1 forwarded, 10 rows, at 1.6 s; first seen here at 1.5 s, before it" in titles


def test_a_server_and_a_sink_of_one_name_have_a_lane_each() -> None:
    events = [
        Event(at(1), "fault", "topic", "outage topic 0.5 s after its first batch"),
        Event(at(1), "outage", "topic", "outage topic 0.5 s after its first batch", at(2)),
        Event(at(2), "outage", "disk", "disk-full 0.5 s after its first batch", at(3)),
    ]
    found = picture(good(events=events))
    assert [word for word in found.words if word in ("topic", "disk", "pg")] == ["disk", "topic", "pg", "topic"]
    kinds = [word for word in found.words if word in ("server", "checkpoint", "kafka sink", "postgres sink")]
    assert kinds == ["checkpoint", "server", "postgres sink", "kafka sink"]
    assert sum("outage topic" in title for title in found.titles) == 2


def test_every_fault_is_seen_in_the_lanes_of_the_sinks() -> None:
    """A line goes down through all of them."""
    faults = [Event(at(n), "fault", "pipeline", "driver 0.5 s after its first batch") for n in range(3)]
    history = good(events=faults)
    html = draw(history, {}, ())
    lines = re.findall(r'<line class="struck" x1="[0-9.]+" y1="([0-9.]+)" x2="[0-9.]+" y2="([0-9.]+)"', html)
    grounds = [float(y) for y in re.findall(r'<rect class="ground" x="0" y="([0-9.]+)"', html)]
    assert len(lines) == 3
    assert all(float(top) < min(grounds) and float(bottom) > max(grounds) for top, bottom in lines)


def test_lives_that_overlap_do_not_hide_each_other() -> None:
    events = [Event(at(n), "life", "pipeline", f"life {n}", at(n + 1.5)) for n in range(3)]
    found = draw(good(events=events), {}, ())
    rows = re.findall(r'<rect class="life" x="[0-9.]+" y="([0-9]+)"', found)
    assert rows[0] == rows[2] != rows[1]


def test_anomalies_are_marked_where_they_were_seen() -> None:
    history = eventful_and_wrong()
    assert any(title.startswith("duplicated at 50.0 s: row 77") for title in picture(history).titles)


def test_two_hundred_lives_and_a_thousand_batches_stay_readable() -> None:
    history = eventful(lives=200, batches_per_life=6, per_batch=2)
    result = audit(history)
    assert result.batches > 1000
    html = page(history, result, Path("output"))
    found = Checked(html)
    assert len(html) < PAGE_BYTES_MAX
    assert sum(found.elements.values()) < ELEMENTS_MAX
    width = max(int(v) for tag, name, v in found.attributes if (tag, name) == ("svg", "width"))
    assert 3000 < width <= WIDTH_MAX


def test_without_batches_the_looks_that_brought_rows_are_shown() -> None:
    history = good(batch_of=(), why_no_batches="the pipeline keeps state")
    assert "10 rows first seen at 0.6 s" in picture(history).titles


@pytest.mark.parametrize("changes", [{"events": (), "sights": ()}, {"began_s": 0.0, "ended_s": 0.0}])
def test_a_history_of_next_to_nothing_can_be_shown(changes: dict[str, Any]) -> None:
    assert read(good(**changes)).elements["svg"] > 0
