"""The audit of a pipeline from Kafka into Kafka, PostgreSQL and MariaDB, on real servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

import semel
from semel.audit.compare import KAFKA_LIMIT
from semel.audit.results import Audit
from semel.audit.run import audit_writer
from semel.dev.kafka import KafkaCluster
from semel.dev.mariadb import MariaDbServer
from semel.dev.postgres import PostgresServer
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.runtime.pipeline import StreamWriter
from semel.sinks.kafka.pool import release_all
from tests.kafka_world import KafkaWorld
from tests.processes import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, ROWS_PER_BATCH, PARTITIONS = 30, 10, 2
COLUMNS = ["CAST(CAST(value AS STRING) AS BIGINT) AS id"]
RECORD = pa.schema([("key", pa.binary()), ("value", pa.binary())])


@dataclass
class Shop:
    """A pipeline of the test's own: topics, tables, checkpoint."""

    spark: SparkSession
    folder: Path
    kafka: str
    databases: dict[str, str] = field(repr=False)
    suffix: str
    modes: dict[str, str]

    @property
    def table(self) -> str:
        return f"audited_{self.suffix}"

    def sinks(self) -> list[semel.Sink]:
        into: dict[str, Any] = {"select": COLUMNS, "create": True, "timeout_s": 5}
        return [
            semel.Kafka(self.kafka, f"out-{self.suffix}", name="topic"),
            semel.Postgres(self.databases["Postgres"], self.table, name="pg", mode=self.modes["Postgres"], **into),
            semel.MySql(self.databases["MySql"], self.table, name="maria", mode=self.modes["MySql"], **into),
        ]

    def writer(self) -> StreamWriter:
        options = {"maxOffsetsPerTrigger": ROWS_PER_BATCH}
        df = semel.read_kafka(self.spark, f"in-{self.suffix}", servers=self.kafka, options=options)
        writer = semel.write(df.select("key", "value")).to(*self.sinks()).queryName(f"audited-{self.suffix}")
        # A task for each partition, so that there are several markers to be compared.
        writer = writer.option("semel.tasks", "partitions")
        return writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True)

    def put(self, rows: int) -> None:
        producer = Producer({"bootstrap.servers": self.kafka})
        for number in range(rows):
            producer.produce(f"in-{self.suffix}", str(number).encode(), partition=number % PARTITIONS)
        assert producer.flush(30) == 0

    def execute_in_mariadb(self, sql: str) -> int:
        """How many rows a statement touched, as somebody else's client."""
        connection = semel.MySql(self.databases["MySql"], self.table).place.connect()
        try:
            cursor = connection.cursor()
            cursor.execute(sql)
            return int(cursor.rowcount)
        finally:
            connection.close()


@pytest.fixture(params=[("ledger", "ledger"), ("prepared", "xa")], ids=["ledger", "native"])
def shop(
    spark: SparkSession,
    tmp_path: Path,
    kafka_cluster: KafkaCluster,
    postgres_server: PostgresServer,
    mariadb_server: MariaDbServer,
    request: pytest.FixtureRequest,
) -> Iterator[Shop]:
    urls = {"Postgres": postgres_server.url, "MySql": mariadb_server.url}
    modes = dict(zip(("Postgres", "MySql"), request.param, strict=True))
    made = Shop(spark, tmp_path, kafka_cluster.bootstrap, urls, uuid.uuid4().hex[:8], modes)
    world = KafkaWorld(made.kafka)
    world.create_topics(f"in-{made.suffix}", f"out-{made.suffix}", partitions=PARTITIONS)
    made.put(ROWS)
    yield made
    world.close()
    release_all()


def kinds(audit: Audit) -> list[str]:
    return [finding.kind for finding in audit.findings]


def sinks(audit: Audit, state: str) -> set[str]:
    return {cell.sink for row in audit.rows for cell in row.cells if cell.state == state}


def listing(shop: Shop) -> list[tuple[str, bytes]]:
    files = sorted(path for path in (shop.folder / "checkpoint").rglob("*") if path.is_file())
    return [(str(path), path.read_bytes()) for path in files]


def test_a_pipeline_over_three_servers_is_proven_and_a_deleted_ledger_row_is_lost(shop: Shop) -> None:
    shop.writer().start().awaitTermination()
    # A driver says that it has left when its query has ended.
    wait_until((shop.folder / "checkpoint" / "semel" / "left" / "0000000001.json").exists)
    before = listing(shop)
    audit = audit_writer(shop.writer())
    assert (audit.verdict, kinds(audit), audit.reasons) == (True, [], ())
    assert listing(shop) == before
    assert [row.range.rows_max for row in audit.rows] == [ROWS_PER_BATCH] * 3
    assert KAFKA_LIMIT in audit.not_proven
    for name in ("topic", "pg", "maria"):
        cells = [cell for row in audit.rows for cell in row.cells if cell.sink == name]
        assert [(cell.state, cell.rows_marked, cell.rows_decided) for cell in cells] == [("marked", 10, 10)] * 3
        by_task = name == "topic" or shop.modes["Postgres"] == "prepared"
        assert {cell.decided for cell in cells} == {PARTITIONS if by_task else 1}
        assert f"{name}: 30 rows in 3 batches, as many as were decided." in audit.proven
    one = "part LIKE '%-t0-r%'" if shop.modes["MySql"] == "xa" else "part = ''"
    removed = f"DELETE FROM semel_ledger WHERE pipeline = '{audit.facts.query}' AND batch = 1 AND {one}"  # noqa: S608 - ours
    assert shop.execute_in_mariadb(removed) == 1
    audit = audit_writer(shop.writer())
    assert audit.verdict is False
    if shop.modes["MySql"] == "xa":
        assert [(f.kind, f.batch, f.sink) for f in audit.findings] == [("torn", 1, "maria")]
    else:
        assert [(f.kind, f.batch, f.sink) for f in audit.findings] == [("lost", 1, "maria"), ("split", 1, "maria")]


def test_beside_a_running_driver_nothing_is_called_wrong(shop: Shop) -> None:
    """The brokers answer a commit before the control topic shows it, so here is a race to lose."""
    running = replace(shop.writer(), trigger_={}).launch()
    commits = shop.folder / "checkpoint" / "commits"
    try:
        wait_until((commits / "0").exists)
        audits = []
        while not (commits / "20").exists():
            assert running.query.isActive, running.query.exception()
            shop.put(ROWS_PER_BATCH)
            audits.append(audit_writer(shop.writer()))
            assert len(audits) < 200, "the pipeline makes no progress"
    finally:
        running.stop()
    assert [(audit.verdict, kinds(audit)) for audit in audits if {*kinds(audit)} - {"in flight"}] == []
    assert {audit.verdict for audit in audits} == {True}
    assert len({len(audit.rows) for audit in audits}) > 3
    last = audit_writer(shop.writer())
    assert (last.verdict, last.facts.incarnation, {*kinds(last)} - {"in flight"}) == (True, 1, set())


def test_a_server_that_is_away_leaves_it_unknown_and_the_others_are_compared(shop: Shop) -> None:
    writer = shop.writer()
    writer.start().awaitTermination()
    away = semel.Postgres("postgresql://nobody@127.0.0.1:1/shop", shop.table, name="pg", timeout_s=2)
    audit = audit_writer(replace(writer, sinks=(writer.sinks[0], away, writer.sinks[2])))
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert audit.reasons[0] == "No batch is proven in every sink."
    assert audit.reasons[1].startswith("Sink pg did not answer: PostgreSQL cannot be reached")
    assert "topic: 30 rows in 3 batches, as many as were decided." in audit.proven
    assert (sinks(audit, "untold"), sinks(audit, "marked")) == ({"pg"}, {"topic", "maria"})


def test_leftovers_of_batches_that_are_over_are_orphans(shop: Shop) -> None:
    """As a task leaves them that Spark ran twice."""
    writer = shop.writer()
    writer.start().awaitTermination()
    query = PipelineId(audit_writer(writer).facts.query)
    sink = writer.sinks[0]
    twin = sink.writer(Branch(Attempt(query, 1, 0, Incarnation(1)), sink.name, 7, 1))
    twin.write(pa.RecordBatch.from_pylist([{"key": None, "value": b"x"}], schema=RECORD))
    twin.prepare()
    audit = audit_writer(writer)
    assert (audit.verdict, [(f.kind, f.batch, f.sink) for f in audit.findings]) == (True, [("orphan", 1, "topic")])
    assert "-b1-a0-i1-t7-r1: staged or prepared" in audit.findings[0].evidence
    # The next start drops it.
    shop.put(ROWS_PER_BATCH)
    shop.writer().start().awaitTermination()
    audit = audit_writer(shop.writer())
    assert (audit.verdict, kinds(audit), len(audit.rows), audit.facts.incarnation) == (True, [], 4, 2)
