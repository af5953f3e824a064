"""Rows that wait in MariaDB as requests: what is stored, what becomes of it, and when rows are staged in plain form."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from semel import formats
from semel.errors import BatchFailed, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.mysql import MySql
from semel.sinks.mysql import moves as mysql_moves
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.loaders import bulk as mysql_bulk
from semel.sinks.mysql.loaders import packed as mysql_packed
from semel.sinks.mysql.loaders.packed import Packer
from semel.sinks.sql.store import stage_table
from semel.testing.harness import attempt, context
from tests.processes import wait_until
from tests.sinks.mysql_rig import KEYED, Database, commit, db, stamped, write
from tests.sinks.participants import prepare, rows, started

__all__ = ["db"]
STAGED = ("ledger", *KEYED)


def stage(db: Database, sink: MySql, *batches: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """What the first piece of a task holds that has these rows."""
    with started(sink) as participant:
        branch = Branch(attempt(), sink.name, 0, 0)
        writer = sink.writer(branch)
        for batch in batches:
            writer.write(batch)
        writer.prepare()
        table = stage_table(str(branch))
        found = db.run(f"SELECT * FROM {table} ORDER BY 1")  # noqa: S608 - ours
        participant.abort([branch])
    assert db.staged() == []
    return found


@pytest.mark.parametrize("mode", STAGED)
def test_a_request_is_stored_as_it_will_be_sent(db: Database, mode: str) -> None:
    ((number, count, layout, keys, body),) = stage(db, db.sink(mode), rows((1, "a"), (2, None)))
    assert (number, count) == (0, 2)
    key = ["id"] if mode == "dedup" else []
    assert json.loads(layout) == {"format": formats.REQUESTS, "columns": [["id", 8, 0], ["text", 252, 0]], "key": key}
    one, two = b"\0" + (1).to_bytes(8, "little"), b"\0" + (2).to_bytes(8, "little")
    assert body == one + b"\0\1a" + two + b"\1"
    assert keys == (one + two if mode == "dedup" else None)


def test_many_rows_are_many_requests_that_keep_their_order(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 100)
    found = stage(db, db.sink("dedup"), rows(*((n, "x" * 20) for n in range(50))), rows((50, "y")))
    assert [row[0] for row in found] == list(range(len(found)))
    assert (len(found) > 10, sum(row[1] for row in found)) == (True, 51)
    assert b"".join(row[3] for row in found) == b"".join(b"\0" + n.to_bytes(8, "little") for n in range(51))


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize("mode", STAGED)
def test_every_mode_does_with_requests_what_it_does_with_rows(
    db: Database, mode: str, firm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New keys, keys that are there, keys that come twice in a request, in two requests, in two tasks."""
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 60)
    batches = [
        [rows((1, "a"), (2, "b"), (3, "c")), rows((4, "d"))],
        [rows((3, "e"), (5, "f"), (5, "g"), (6, "h"), (7, "i"), (5, "j")), rows((8, "k"), (9, "l"))],
        [rows((10, "m")), rows((1, "n"))],
    ]
    found = []
    for wanted, table in ((mysql_wire.WANTED, "packed"), (0, "plain")):
        monkeypatch.setattr(mysql_wire, "WANTED", wanted)
        sink = db.sink(mode, table=f"{table}{db.suffix}", name=f"{table}{db.suffix}", firm=firm)
        write(sink, *batches)
        found.append(db.run(f"SELECT * FROM {sink.table} ORDER BY 1, 2"))  # noqa: S608 - ours
    assert found[0] == found[1]
    assert len(found[0]) == {"ledger": 14, "versions": 12}.get(mode, 10)
    assert db.staged() == []


def test_order_by_decides_between_rows_of_one_request(db: Database) -> None:
    sink = db.sink("upsert", order_by="at")
    write(sink, stamped((1, "old", 5), (1, "new", 9), (1, "older", 3), (2, "a", None), (2, "b", 1), (2, "c", None)))
    assert db.rows("id, text") == [(1, "new"), (2, "b")]


def test_ids_that_are_known_are_left_out_in_a_promise_that_outlives_the_driver(db: Database) -> None:
    """The driver has unpacked the requests into a table of its session, and then its session ends."""
    sink = db.sink("dedup", firm=True)
    write(sink, rows((1, "a")))
    with started(sink, context(2)) as participant:
        (promise,) = prepare(participant, sink, attempt(1, 0, 2), rows((1, "b"), (2, "c"), (2, "d")))
        assert promise.payload["prepared"]
    with started(sink, context(3)) as participant:
        assert commit(participant, [promise]) is Outcome.COMMITTED
        assert commit(participant, [promise]) is Outcome.ALREADY_COMMITTED
    assert db.rows() == [(1, "a"), (2, "c")]


@pytest.mark.parametrize("mode", ["dedup", "upsert"])
def test_a_statement_does_not_outlive_what_it_failed_at(db: Database, mode: str) -> None:
    """The driver keeps its connection, and a server holds a limited number of statements for all of its clients."""
    sink = db.sink(mode, create=False)
    db.create("id bigint PRIMARY KEY, text varchar(3)")
    count = "SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'"
    with started(sink) as participant:
        store: Any = participant.store  # type: ignore[attr-defined]
        found = []
        for number in range(4):
            promise = prepare(participant, sink, attempt(number), rows((1, "abc"), (number, "abc")))
            commit(participant, promise)
            with pytest.raises(BatchFailed):
                prepare(participant, sink, attempt(10 + number), rows((100, "abcd")))
            participant.abort(participant.recover().branches)
            found.append(store.run(store._holder, count)[0][1])
    assert found == [found[0]] * 4


#: The key of a sink when a driver died, and of that which goes on.
CHANGES = [(("id",), ("text",)), (("id", "text"), ("text", "id")), (("id",), ("id", "text")), ((), ("id",))]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_ids_are_remembered_by_the_key_that_the_sink_has_now(
    db: Database, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    db.create("id varchar(9), text varchar(9)")
    known = pa.RecordBatch.from_pylist([{"id": "a", "text": "b"}])
    again = pa.RecordBatch.from_pylist([{"id": "a", "text": "b"}, {"id": "b", "text": "a"}])
    new = db.sink("dedup", key=after)
    write(new, known)
    old = db.sink("dedup", key=before) if before else db.sink()
    with started(old, context(2)) as participant:
        (promise,) = prepare(participant, old, attempt(1, 0, 2), again)
    with started(new, context(3)) as participant:
        assert commit(participant, [promise]) is Outcome.COMMITTED
        assert commit(participant, prepare(participant, new, attempt(2, 0, 3), again)) is Outcome.COMMITTED
    assert db.rows() == [("a", "b"), ("b", "a")]


def test_a_row_that_no_packet_can_carry_makes_its_task_stage_in_plain_form(db: Database) -> None:
    db.create("n bigint unsigned AUTO_INCREMENT PRIMARY KEY, id bigint, text longtext")
    sink, large = db.sink(), "ž" * 10_000_000
    with started(sink) as participant:
        writer: Any = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(rows((1, "a")))
        assert type(writer._loader) is Packer
        writer.write(rows((2, "b"), (3, large), (4, "c")))
        assert not isinstance(writer._loader, Packer)
        writer.write(rows((5, "d")))
        assert not isinstance(writer._loader, Packer)
        part = writer.prepare()
        assert part.payload["pieces"] == [1, 4]
        assert commit(participant, participant.prepare(attempt(), [part])) is Outcome.COMMITTED
    found = db.rows("id, char_length(text)", "n")
    assert found == [(1, 1), (2, 1), (3, 10_000_000), (4, 1), (5, 1)]
    assert db.staged() == []


def refused(db: Database, sink: MySql, batches: Sequence[pa.RecordBatch]) -> str:
    with started(sink) as participant:
        with pytest.raises(BatchFailed) as caught:
            prepare(participant, sink, attempt(), *batches)
        participant.abort(participant.recover().branches)
    assert db.staged() == []
    return str(caught.value)


def test_a_row_that_the_driver_cannot_insert_is_named_and_nothing_is_visible(db: Database) -> None:
    db.create("id bigint PRIMARY KEY, text varchar(3)")
    assert "Duplicate entry '7' for key 'PRIMARY'" in refused(db, db.sink(), [rows((7, "a")), rows((8, "b"), (7, "c"))])
    assert "rows were changed: Data truncated for column 'text' at row 2" in refused(
        db, db.sink("upsert"), [rows((1, "abc"), (2, "abc "))]
    )
    assert db.rows() == []


def test_a_stage_that_lost_a_request_is_no_batch(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 60)
    sink = db.sink()
    with started(sink) as participant:
        branch = Branch(attempt(), sink.name, 0, 0)
        writer = sink.writer(branch)
        writer.write(rows(*((n, "a") for n in range(20))))
        part = writer.prepare()
        db.run(f"DELETE FROM {stage_table(str(branch))} WHERE semel_number = 1")  # noqa: S608 - ours
        with pytest.raises(BatchFailed, match="vanished before the decision: 15 of 20 rows are staged"):
            participant.prepare(attempt(), [part])
        participant.abort([branch])
    assert (db.rows(), db.staged()) == ([], [])


@pytest.mark.parametrize("patience_s", [1, 20])
def test_who_waits_to_drop_a_stage_delays_its_move_or_has_it_tried_again(
    db: Database, patience_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has read the stage, he waits for the driver, and the driver's second connection waits for him."""
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 60)
    sink, table = db.sink(timeout_s=2), stage_table(str(Branch(attempt(), db.sink().name, 0, 0)))
    droppers: list[threading.Thread] = []

    def drop() -> None:
        with suppress(pymysql.Error), db.session() as cursor:
            cursor.execute(f"SET SESSION lock_wait_timeout = {patience_s}")
            cursor.execute(f"DROP TABLE {table}")

    def is_waiting() -> bool:
        waits = "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table metadata lock%%'"
        return bool(db.run(f"{waits} AND info = %s", f"DROP TABLE {table}"))

    def inserting(*given: Any) -> Any:
        droppers.append(threading.Thread(target=drop))
        droppers[0].start()
        wait_until(is_waiting)
        return mysql_packed.inserting(*given)

    monkeypatch.setattr(mysql_moves, "inserting", inserting)
    with started(sink) as participant:
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(rows(*((n, "a") for n in range(20))))
        part = writer.prepare()
        if patience_s < sink.timeout_s:
            assert commit(participant, participant.prepare(attempt(), [part])) is Outcome.COMMITTED
        else:
            with pytest.raises(SinkUnavailable, match="Lock wait timeout exceeded"):
                participant.prepare(attempt(), [part])
            participant.abort([part.branch])
    droppers[0].join()
    assert (len(droppers), db.rows("count(*)", "1"), db.staged()) == (1, [(20 if patience_s == 1 else 0,)], [])


def test_versions_of_which_few_are_kept_are_staged_in_plain_form(db: Database) -> None:
    sink = db.sink("versions", versions_kept=1)
    writer: Any = sink.writer(Branch(attempt(), sink.name, 0, 0))
    writer.write(rows((1, "a")))
    assert not isinstance(writer._loader, Packer)
    writer.abort()
