"""Rows into Kafka topics and folders: each at the place that the feeder says, and at no other."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from semel.dev.kafka import KafkaCluster
from semel.dev.ports import free_port
from semel.errors import ConfigError, SourceUnavailable
from semel.sources.plan import PlannedSource
from semel.verify.feeders import Feeder, FilePlace, KafkaPlace, open_feeder
from semel.verify.workload import DEFAULT, Workload
from tests.kafka_world import KafkaWorld

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HARD = 'a "quoted", \\ and ; größe'


def hard_row(n: int) -> dict[str, Any]:
    return {"id": n, "text": f"{HARD} {n}"}


def refused(make: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value


# Which source -------------------------------------------------------------------------------------------------------


def kafka_source(servers: str = "127.0.0.1:1", **options: str) -> PlannedSource:
    return PlannedSource("kafka", {"kafka.bootstrap.servers": servers, "startingoffsets": "earliest", **options})


def test_a_source_that_cannot_be_fed_is_refused_with_those_that_can() -> None:
    error = refused(lambda: open_feeder([PlannedSource("rate")], DEFAULT, 10))
    assert error.what == "No source of this pipeline can be fed: rate."
    assert "Kafka topics" in error.remedy
    assert "--sinks" in error.remedy


def test_a_source_that_can_be_fed_is_found_among_others(tmp_path: Path) -> None:
    sources = [PlannedSource("rate"), PlannedSource("json", {"path": str(tmp_path)})]
    open_feeder(sources, DEFAULT, 10).feed(3)
    assert len(list(tmp_path.iterdir())) == 1


def test_two_sources_that_can_be_fed_are_refused(tmp_path: Path) -> None:
    sources = [PlannedSource("json", {"path": str(tmp_path)}), kafka_source(subscribe="orders")]
    assert "2 sources" in refused(lambda: open_feeder(sources, DEFAULT, 10)).what


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subscribepattern": "orders.*"}, "pattern"),
        ({"assign": "orders"}, "assign"),
        ({"subscribe": "orders", "startingoffsets": "latest"}, "starts at latest"),
        ({"subscribe": "orders", "startingoffsets": '{"orders":{"0":5}}'}, "pass over rows"),
    ],
)
def test_a_kafka_source_that_would_not_read_the_rows_is_refused(options: dict[str, str], says: str) -> None:
    assert says in refused(lambda: open_feeder([kafka_source(**options)], DEFAULT, 10)).what


def test_a_kafka_source_without_a_start_is_refused_because_spark_starts_at_the_end() -> None:
    source = PlannedSource("kafka", {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders"})
    assert "starts at latest" in refused(lambda: open_feeder([source], DEFAULT, 10)).what


# Files --------------------------------------------------------------------------------------------------------------


def file_feeder(kind: str, path: Path | str, workload: Workload = DEFAULT, rows: int = 10, **options: Any) -> Feeder:
    return open_feeder([PlannedSource(kind, {"path": str(path), **options})], workload, rows)


def test_each_file_has_the_rows_of_one_batch_and_is_where_the_feeder_says(tmp_path: Path) -> None:
    feeder = file_feeder("json", tmp_path / "in")
    feeder.check_empty()
    feeder.feed(25)
    feeder.feed(7)
    found = {str(path): path.read_text().splitlines() for path in sorted((tmp_path / "in").iterdir())}
    assert [len(lines) for lines in found.values()] == [10, 10, 5, 7]
    placed = [json.loads(line) | {"path": path} for path, lines in found.items() for line in lines]
    assert placed == [DEFAULT.row(n) | {"path": feeder.places[n].path} for n in range(32)]  # type: ignore[operator, union-attr]
    assert (feeder.fed, feeder.keeps_order) == (32, False)


def test_files_differ_in_age_because_spark_takes_them_by_it(tmp_path: Path) -> None:
    file_feeder("json", tmp_path, rows=1).feed(30)
    ages = [path.stat().st_mtime_ns // 1_000_000 for path in sorted(tmp_path.iterdir())]
    assert ages == sorted(set(ages))
    assert len(ages) == 30


def test_rows_are_known_by_their_identity_before_they_can_be_seen(tmp_path: Path) -> None:
    class Watched(Workload):
        def encode(self, n: int) -> bytes:
            assert feeder.number_of(str(n)) == n
            return super().encode(n)

    feeder = file_feeder("json", tmp_path, Watched(DEFAULT.row))
    feeder.feed(10)
    assert [feeder.number_of(text) for text in ("9", "10", "x")] == [9, None, None]


def test_two_rows_of_one_identity_are_not_fed(tmp_path: Path) -> None:
    feeder = file_feeder("json", tmp_path, Workload(lambda n: {"id": n % 10}))
    feeder.feed(10)
    assert "Rows 0 and 10 " in refused(lambda: feeder.feed(1)).what
    assert feeder.fed == 10


@pytest.mark.parametrize("name", ["data.json", "more/data.json"])
def test_a_folder_with_files_of_somebody_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert "data.json" in refused(file_feeder("json", tmp_path).check_empty).what


def test_what_spark_passes_over_is_no_file_of_somebody_else(tmp_path: Path) -> None:
    for name in ("_SUCCESS", ".hidden.json", "notes.md"):
        (tmp_path / name).write_text("")
    file_feeder("json", tmp_path / "*.json").check_empty()
    assert "notes.md" in refused(file_feeder("json", tmp_path).check_empty).what


def test_files_are_named_so_that_the_pattern_of_the_source_matches(tmp_path: Path) -> None:
    feeder = file_feeder("csv", f"file://{tmp_path}/in/*.csv")
    feeder.feed(1)
    assert feeder.places == [FilePlace(f"{tmp_path}/in/verify-0000000.csv")]


@pytest.mark.parametrize(
    ("kind", "path", "options"),
    [
        ("json", "in/*.txt", {}),
        ("json", "in/*", {}),
        ("json", "in", {"pathglobfilter": "*.txt"}),
        ("json", "in/*/x", {}),
        ("json", "hdfs://host/in", {}),
        ("json", "", {}),
        ("json", "in", {"multiline": "true"}),
        ("text", "in", {"wholetext": "true"}),
    ],
)
def test_a_file_source_that_cannot_be_fed_is_refused(kind: str, path: str, options: dict[str, str]) -> None:
    refused(lambda: file_feeder(kind, path, DEFAULT, 10, **options))


def test_a_row_that_is_more_than_a_line_is_refused(tmp_path: Path) -> None:
    torn = Workload(lambda n: f"{n}\n", identify=str)
    assert "line break" in refused(lambda: file_feeder("text", tmp_path, torn).feed(1)).what
    torn = Workload(lambda n: {"id": n, "text": "a\nb"})
    assert "line break" in refused(lambda: file_feeder("csv", tmp_path, torn).feed(1)).what
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_bytes_cannot_be_columns_of_parquet(tmp_path: Path) -> None:
    feeder = file_feeder("parquet", tmp_path, Workload(lambda n: b"%d" % n, identify=str))
    assert "made of fields" in refused(lambda: feeder.feed(1)).what


def test_parquet_files_keep_the_types_of_the_rows(tmp_path: Path) -> None:
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    file_feeder("parquet", tmp_path, Workload(lambda n: {"id": n, "at": at, "x": n / 2})).feed(3)
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).to_pylist() == [{"id": n, "at": at, "x": n / 2} for n in range(3)]


def test_a_folder_that_takes_no_file_is_an_unavailable_source(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a file")
    with pytest.raises(SourceUnavailable) as caught:
        file_feeder("json", tmp_path / "in").feed(1)
    assert caught.value.data_now == "0 rows were fed"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("json", {}),
        ("parquet", {}),
        ("csv", {}),
        ("csv", {"header": "true", "sep": ";"}),
        ("csv", {"quote": "'", "escape": "|", "delimiter": "\t"}),
    ],
)
def test_spark_reads_the_rows_as_they_were_made(
    spark: SparkSession, tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    file_feeder(kind, tmp_path, Workload(hard_row), rows=4, **options).feed(10)
    found = spark.read.format(kind).options(**options).schema("id long, text string").load(str(tmp_path)).collect()
    assert sorted(row.asDict()["text"] for row in found) == sorted(hard_row(n)["text"] for n in range(10))


def test_spark_reads_a_line_of_text_for_each_row(spark: SparkSession, tmp_path: Path) -> None:
    file_feeder("text", tmp_path, Workload(lambda n: f"{HARD} {n}", identify=str), rows=4).feed(10)
    found = [row.value for row in spark.read.text(str(tmp_path)).collect()]
    assert sorted(found) == sorted(f"{HARD} {n}" for n in range(10))


# Kafka --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(kafka_cluster: KafkaCluster) -> Iterator[KafkaWorld]:
    made = KafkaWorld(kafka_cluster.bootstrap)
    yield made
    made.close()


@pytest.fixture
def topic() -> str:
    return f"in-{uuid.uuid4().hex[:8]}"


def where(world: KafkaWorld, *topics: str) -> dict[KafkaPlace, bytes]:
    return {KafkaPlace(r.topic, r.partition, r.offset): r.value for topic in topics for r in world.committed(topic)}


def test_rows_are_in_the_topic_at_the_places_that_the_feeder_says(world: KafkaWorld, topic: str) -> None:
    feeder = open_feeder([kafka_source(world.servers, subscribe=topic)], DEFAULT, 10)
    feeder.check_empty()
    feeder.feed(2500)
    feeder.feed(500)
    found = where(world, topic)
    assert [found[place] for place in feeder.places] == [DEFAULT.encode(n) for n in range(3000)]  # type: ignore[index]
    assert len(found) == 3000
    assert {place.partition for place in found} == {0, 1}
    feeder.close()


def test_rows_of_one_key_are_in_one_partition_in_their_order(world: KafkaWorld, topic: str) -> None:
    topics = [topic, f"{topic}-b"]
    feeder = open_feeder([kafka_source(world.servers, subscribe=", ".join(topics))], DEFAULT, 10)
    feeder.feed(1000)
    assert feeder.keeps_order
    by_key: dict[str, list[Any]] = {}
    for n, place in enumerate(feeder.places):
        by_key.setdefault(DEFAULT.key(n), []).append(place)
    assert all(len({place[:2] for place in places}) == 1 for places in by_key.values())
    assert all(places == sorted(places, key=lambda place: place[2]) for places in by_key.values())
    # Both topics and all of their partitions are used, and the keys of the records are those of the workload.
    assert set(Counter(place[:2] for place in feeder.places)) == {(t, p) for t in topics for p in (0, 1)}
    assert {r.key.decode() for t in topics for r in world.committed(t)} == set(by_key)
    feeder.close()


def test_feeding_no_rows_makes_the_topic(world: KafkaWorld, topic: str) -> None:
    feeder = open_feeder([kafka_source(world.servers, subscribe=topic)], DEFAULT, 10)
    feeder.check_empty()
    assert world.wire.partitions(topic) == 0
    feeder.feed(0)
    assert (world.wire.partitions(topic), feeder.fed) == (2, 0)
    feeder.close()


def test_only_the_partitions_that_the_source_reads_are_fed(world: KafkaWorld, topic: str) -> None:
    world.create_topics(topic, partitions=3)
    feeder = open_feeder([kafka_source(world.servers, assign=json.dumps({topic: [1, 2]}))], DEFAULT, 10)
    feeder.feed(200)
    assert set(Counter(r.partition for r in world.committed(topic))) == {1, 2}
    assert len(where(world, topic)) == 200
    feeder.close()


def test_a_partition_that_is_missing_is_told_before_a_row_is_fed(world: KafkaWorld, topic: str) -> None:
    world.create_topics(topic, partitions=2)
    feeder = open_feeder([kafka_source(world.servers, assign=json.dumps({topic: [1, 7]}))], DEFAULT, 10)
    with pytest.raises(SourceUnavailable, match=f"has no {topic}-7"):
        feeder.feed(1)
    assert world.committed(topic) == []
    feeder.close()


def test_a_topic_with_records_of_somebody_else_is_refused(world: KafkaWorld, topic: str) -> None:
    world.create_topics(topic)
    send(world, topic)
    feeder = open_feeder([kafka_source(world.servers, subscribe=topic)], DEFAULT, 10)
    assert f"Topic {topic} at {world.servers} is not empty" in refused(feeder.check_empty).what
    refused(lambda: feeder.feed(1))
    assert len(world.committed(topic)) == 1
    feeder.close()


def test_a_record_that_somebody_else_writes_meanwhile_is_noticed(world: KafkaWorld, topic: str) -> None:
    feeder = open_feeder([kafka_source(world.servers, subscribe=topic)], DEFAULT, 10)
    feeder.feed(10)
    send(world, topic)
    with pytest.raises(SourceUnavailable, match="that ends at") as caught:
        feeder.feed(10)
    assert caught.value.data_now.startswith("10 rows were fed;")
    assert feeder.fed == 10
    feeder.close()


def test_a_broker_that_is_away_is_an_unavailable_source() -> None:
    feeder = open_feeder([kafka_source(f"127.0.0.1:{free_port()}", subscribe="orders")], DEFAULT, 10)
    with pytest.raises(SourceUnavailable, match="does not answer"):
        feeder.check_empty()
    feeder.close()


def send(world: KafkaWorld, topic: str) -> None:
    producer = Producer({"bootstrap.servers": world.servers})
    producer.produce(topic, b"not ours", partition=0)
    assert producer.flush(20) == 0
