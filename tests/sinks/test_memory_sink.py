"""What is special about Memory: rows come out as they went in."""

from __future__ import annotations

import uuid
from datetime import date, datetime, timezone
from decimal import Decimal

import pyarrow as pa

from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.memory import Memory
from semel.testing.harness import attempt, context


def test_every_value_comes_out_as_it_went_in() -> None:
    row = {
        "at": datetime(2024, 7, 1, 12, tzinfo=timezone.utc),
        "day": date(2024, 7, 1),
        "price": Decimal("1.50"),
        "bytes": b"\x00\xff",
        "tags": ["a", None],
        "none": None,
    }
    schema = pa.schema(
        [
            ("at", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("price", pa.decimal128(10, 2)),
            ("bytes", pa.binary()),
            ("tags", pa.list_(pa.string())),
            ("none", pa.null()),
        ]
    )
    sink = Memory(uuid.uuid4().hex)
    writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
    for _ in range(2):
        writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    participant = sink.participant(context())
    (committable,) = participant.prepare(attempt(), [writer.prepare()])
    assert sink.rows() == []
    assert participant.commit(committable) is Outcome.COMMITTED
    assert sink.rows() == [row, row]


def test_sinks_of_one_table_name_share_their_rows() -> None:
    table = uuid.uuid4().hex
    writer = Memory(table, name="one").writer(Branch(attempt(), "one", 0, 0))
    writer.write(pa.RecordBatch.from_pydict({"id": [1]}))
    participant = Memory(table, name="one").participant(context())
    participant.commit(*participant.prepare(attempt(), [writer.prepare()]))
    assert Memory(table, name="two").rows() == [{"id": 1}]
    assert Memory(uuid.uuid4().hex).rows() == []
