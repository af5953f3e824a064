"""Numbers of formats: what carries none is read as the first, what is newer is refused by name."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from semel import formats
from semel.decisions.records import committable_from_json, committable_to_json
from semel.errors import NewerRecord
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Committable
from semel.sinks import Files, Sqlite
from semel.sinks.base import Context, Sink
from semel.testing.harness import OTHERS, OURS, rows_of, stage

PLAN = "sha256:" + "0" * 64
ATTEMPT = Attempt(OURS, 3, 0, Incarnation(1))
#: As semel 0.1 made it.
OLD_LEDGER = """
CREATE TABLE semel_ledger (
    pipeline TEXT NOT NULL, sink TEXT NOT NULL, batch INTEGER NOT NULL, attempt INTEGER NOT NULL,
    incarnation INTEGER NOT NULL, rows INTEGER NOT NULL, name TEXT NOT NULL,
    committed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (pipeline, sink, batch)
) WITHOUT ROWID
"""


def sinks(folder: Path) -> tuple[Sink, Sink]:
    return Sqlite(str(folder / "shop.db"), "orders", name="small"), Files(str(folder / "lake"), name="lake")


def committed(sink: Sink) -> None:
    participant = sink.participant(Context(OURS, "shop", Incarnation(1)))
    try:
        participant.fence()
        parts = [replace(part, plan=PLAN) for part in stage(sink, ATTEMPT, [rows_of(1, 2, 3)])]
        for committable in participant.prepare(ATTEMPT, parts):
            participant.commit(committable)
    finally:
        participant.close()


def test_markers_say_what_was_planned_for_their_rows(tmp_path: Path) -> None:
    for sink in sinks(tmp_path):
        committed(sink)
        assert [mark.plan for mark in sink.evidence(OURS, range(9)).marks] == [PLAN]


def test_a_committable_carries_its_number_and_a_newer_one_is_refused() -> None:
    committable = Committable("lake", "lake", ATTEMPT, 3)
    body = committable_to_json(committable)
    assert body["format"] == formats.COMMITTABLE
    without = {name: value for name, value in body.items() if name not in ("format", "plan")}
    assert committable_from_json(body) == committable_from_json(without) == committable
    with pytest.raises(NewerRecord) as caught:
        committable_from_json({**body, "format": formats.COMMITTABLE + 1})
    assert str(caught.value) == (
        "The committable lake of batch 3 for sink lake has format 2; this semel reads up to 1.\n"
        "  the data now: this start wrote nothing; what was visible before still is\n"
        "  what to do: Run this pipeline with the newer semel that wrote the record."
    )


def test_a_manifest_of_a_newer_semel_is_refused(tmp_path: Path) -> None:
    _, lake = sinks(tmp_path)
    committed(lake)
    (manifest,) = (tmp_path / "lake").glob("_semel/manifests/*/*/*.json")
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "version": formats.MANIFEST + 1}))
    with pytest.raises(NewerRecord, match="of sink lake has format 2; this semel reads up to 1"):
        lake.evidence(OURS, range(9))


def test_a_ledger_of_a_newer_semel_is_refused_to_who_writes_and_to_who_looks(tmp_path: Path) -> None:
    small, _ = sinks(tmp_path)
    committed(small)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as other:
        other.execute("UPDATE semel_ledger SET format = 2")
        other.commit()
    told = r"The ledger of sink small \(SQLite table orders in .*\) has format 2; this semel reads up to 1"
    with pytest.raises(NewerRecord, match=told):
        small.evidence(OURS, range(9))
    participant = small.participant(Context(OURS, "shop", Incarnation(2)))
    try:
        with pytest.raises(NewerRecord, match=told):
            participant.recover()
    finally:
        participant.close()


def test_an_older_ledger_is_read_and_gets_what_it_lacks(tmp_path: Path) -> None:
    small, _ = sinks(tmp_path)
    elsewhere = Sqlite(str(tmp_path / "shop.db"), "returns", name="small")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as old:
        old.execute(OLD_LEDGER)
        old.execute("CREATE TABLE semel_fence (pipeline TEXT PRIMARY KEY, incarnation INTEGER NOT NULL) WITHOUT ROWID")
        old.execute(
            "INSERT INTO semel_ledger (pipeline, sink, batch, attempt, incarnation, rows, name) "
            "VALUES (?, 'small', 2, 0, 1, 5, 'shop')",
            (OURS,),
        )
        old.commit()
    assert [(mark.batch, mark.rows, mark.plan) for mark in small.evidence(OURS, range(9)).marks] == [(2, 5, "")]
    committed(small)
    assert [(m.batch, m.rows, m.plan) for m in small.evidence(OURS, range(9)).marks] == [(2, 5, ""), (3, 3, PLAN)]
    # Into which table the older rows went nobody knows; of the younger ones it is known.
    assert (namesakes(small), namesakes(elsewhere)) == ((OURS,), (OURS,))
    with closing(sqlite3.connect(tmp_path / "shop.db")) as new:
        new.execute("DELETE FROM semel_ledger WHERE batch = 2")
        new.commit()
    assert (namesakes(small), namesakes(elsewhere)) == ((OURS,), ())


def namesakes(sink: Sink) -> tuple[PipelineId, ...]:
    """What another pipeline of the same name finds of us."""
    with closing(sink.participant(Context(OTHERS, "shop", Incarnation(1)))) as participant:
        return participant.recover().namesakes
