"""The pipeline that the kill tests run and kill: one process, one query, everything else from one JSON argument.

It reads JSON files, or a Kafka topic when `servers` is given; then it writes to a Kafka topic, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import semel
from semel.dev.jars import connector_jars
from semel.errors import SemelError
from semel.ids import Branch
from semel.kafka.tokens import Unsecured
from semel.runtime.hands import DRIVER_ROWS
from semel.runtime.phases import Limits, Report
from semel.runtime.pipeline import StreamWriter
from semel.sinks.base import StagedPart, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Setup:
    """What to run. `sink` is sqlite, files, both or kafka; `shape` is stateless, stateful, windowed or hanging.

    The rest is for Kafka: `topics` are the input and the output, `kafka` are arguments of the sink. `forever` goes on
    when the input is at its end, until it is killed. In the shape "unsigned" rows do not say which task wrote them, so
    that they are the same however Spark numbers its tasks. `stores` adds a table in each of these databases, by kind
    and url; `tables` are arguments of their sinks. `limits` say how long a batch tries. `source` are options of the
    reader. `tasks` says who writes: a task for each partition, or as semel chooses, which is mostly the driver here.
    With `tokens_for` the sink logs in as that user, with tokens of a function in here.
    """

    folder: str
    sink: str = "sqlite"
    shape: str = "stateless"
    guarantee: str = "exactly-once"
    master: str = "local[2]"
    checkpoint: str = ""
    conf: tuple[tuple[str, str], ...] = ()
    drop_in: bool = False
    timeout_s: float = 60.0
    servers: str = ""
    topics: tuple[str, str] = ("", "")
    rows_per_batch: int = 40
    kafka: Mapping[str, Any] = field(default_factory=dict)
    forever: bool = False
    stores: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    power_loss_safe: bool = True
    tasks: str = "partitions"
    driver_rows: int = DRIVER_ROWS
    source: Mapping[str, str] = field(default_factory=dict)
    tokens_for: str = ""


#: The environment variable with the options of our JVM; see tests/quick_spark.py.
JAVA_OPTIONS = "SEMEL_TEST_JAVA_OPTIONS"
HANG_SECONDS = 60
#: So short that a life needs several.
TOKEN_LIFE_S = 3.0
#: What an unsigned row has in place of its task.
NO_TASK = -1
SCHEMA = "id long, key string, amount long, at timestamp"


def session(setup: Setup) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Whoever starts a child by hand has no such path. `spark.jars` would do, but classes from there are not archived.
    os.environ.setdefault("SPARK_DIST_CLASSPATH", os.pathsep.join(map(str, connector_jars(say=_to_stderr))))
    builder = (
        SparkSession.builder.master(setup.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        # A life is short: compiling its plans would take longer than interpreting them.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", os.environ.get(JAVA_OPTIONS, ""))
        .config("spark.executor.extraJavaOptions", os.environ.get(JAVA_OPTIONS, ""))
    )
    for key, value in setup.conf:
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def rows(setup: Setup, spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

    if setup.servers:
        return _kafka_rows(setup, spark)
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(f"{setup.folder}/in")
    if setup.shape in ("stateless", "hanging"):
        return source.select("id", "key", "amount")
    if setup.shape == "stateful":
        return source.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    windowed = source.withWatermark("at", "1 minute").groupBy(F.window("at", "1 minute"), "key").count()
    return windowed.select(F.col("window.start").alias("start"), "key", F.col("count").alias("n"))


def _kafka_rows(setup: Setup, spark: SparkSession) -> DataFrame:
    """The rows as they are. The value says where each came from, and which task wrote it: that is what audits go by."""
    source = semel.read_kafka(
        spark,
        setup.topics[0],
        servers=setup.servers,
        options={"maxOffsetsPerTrigger": setup.rows_per_batch, **setup.source},
    )
    task = NO_TASK if setup.shape == "unsigned" else "spark_partition_id()"
    return source.selectExpr("key", f"concat_ws(' ', partition, offset, {task}) AS value")


@dataclass(frozen=True)
class HangingSqlite(semel.Sqlite):
    """Its first attempt at a task prepares the rows and then hangs; a copy of the task does not."""

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        return HangingWriter(semel.Sqlite.writer(self, branch, durable=durable, plan=plan))


class HangingWriter(Writer):
    def __init__(self, real: Writer) -> None:
        self.real = real

    def write(self, batch: Any) -> None:
        self.real.write(batch)

    def prepare(self) -> StagedPart:
        import time

        from pyspark import TaskContext

        part = self.real.prepare()
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            time.sleep(HANG_SECONDS)
        return part

    def abort(self) -> None:
        self.real.abort()


@dataclass(frozen=True)
class HangingKafka(semel.Kafka):
    """In batch 1 the first attempt at a task sends its rows, and stops before it has prepared them."""

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        return HangingKafkaWriter(semel.Kafka.writer(self, branch, durable=durable, plan=plan), branch)


class HangingKafkaWriter(HangingWriter):
    def __init__(self, real: Writer, branch: Branch) -> None:
        super().__init__(real)
        self.inside: Any = real
        self.hangs = branch.attempt.batch == 1

    def prepare(self) -> StagedPart:
        from pyspark import TaskContext

        context = TaskContext.get()
        if self.hangs and context is not None and context.attemptNumber() == 0:
            self.inside._ready.producer.flush(HANG_SECONDS)
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.real.prepare()


#: What a table keeps of a row: its id, and where it came from.
COLUMNS = (
    "CAST(CAST(key AS STRING) AS BIGINT) AS id",
    *(f"CAST(split(value, ' ')[{n}] AS BIGINT) AS {name}" for n, name in enumerate(("part", "place", "task"))),
)


def _tables(setup: Setup) -> list[semel.Sink]:
    kinds: dict[str, Any] = {name: getattr(semel, name, None) for name in ("Postgres", "MySql")}
    return [
        kinds[kind](url, f"out_{setup.topics[1].replace('-', '_')}", select=COLUMNS, create=True, **setup.tables)
        for kind, url in setup.stores.items()
    ]


def sinks(setup: Setup) -> list[semel.Sink]:
    if setup.servers:
        topic = HangingKafka if setup.shape == "hanging" else semel.Kafka
        tokens: dict[str, Any] = {"token_provider": partial(token, setup.tokens_for)} if setup.tokens_for else {}
        return [topic(setup.servers, setup.topics[1], **setup.kafka, **tokens), *_tables(setup)]
    table = HangingSqlite if setup.shape == "hanging" else semel.Sqlite
    made: dict[str, semel.Sink] = {
        "sqlite": table(f"{setup.folder}/out.db", "out", timeout_s=setup.timeout_s),
        "files": semel.Files(f"{setup.folder}/out"),
    }
    return list(made.values()) if setup.sink == "both" else [made[setup.sink]]


def token(user: str) -> tuple[str, float]:
    """As a script of a user has it: a function that workers get with each task, for they cannot import it."""
    text, _ = Unsecured(user, TOKEN_LIFE_S)()
    return text, TOKEN_LIFE_S


def writer(setup: Setup, spark: SparkSession) -> StreamWriter:
    made = semel.write(rows(setup, spark), guarantee=setup.guarantee).to(*sinks(setup))
    made = made.option("checkpointLocation", setup.checkpoint or f"{setup.folder}/checkpoint")
    made = made.commit_limits(Limits(**setup.limits)).option("semel.powerLossSafe", setup.power_loss_safe)
    made = made.options(**{"semel.tasks": setup.tasks, "semel.driverRows": setup.driver_rows})
    made = made if setup.forever else made.trigger(availableNow=True)
    return made.outputMode({"stateful": "update"}.get(setup.shape, "append")).queryName("killed")


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def say(event: str, **details: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def heard(report: Report) -> None:
    say(
        "batch",
        batch=report.batch,
        how=report.how,
        rows=report.rows,
        attempt=report.attempt,
        staged=report.staged,
        hands=report.hands,
    )


def main() -> int:
    setup = Setup(**json.loads(sys.argv[1]))
    spark = session(setup)
    say("session")
    try:
        if setup.drop_in:
            made = writer(setup, spark)
            function = semel.sink(*sinks(setup), guarantee=setup.guarantee, name="killed", tasks=setup.tasks)
            function.listener = heard
            stream = rows(setup, spark).writeStream.foreachBatch(function).outputMode(made.output_mode)
            query = stream.option("checkpointLocation", made.checkpoint).trigger(availableNow=True).start()
        else:
            query = writer(setup, spark).launch(heard).query
        say("started", pid=os.getpid())
        query.awaitTermination()
    except SemelError as error:
        say("failed", kind=type(error).__name__, text=str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - whatever Spark wraps it in, the test reads the text
        say("failed", kind=type(error).__name__, text=str(error))
        return 1
    say("ended")
    return 0


def load_classes() -> None:
    """Run a small stream of every kind once, for the JVM to archive the classes that it has loaded then."""
    import tempfile

    from semel.dev.kafka import kafka

    with tempfile.TemporaryDirectory() as folder, kafka(Path(folder) / "kafka", quick=True) as cluster:
        (Path(folder) / "in").mkdir()
        (Path(folder) / "in" / "one.json").write_text(
            '{"id": 1, "key": "k", "amount": 1, "at": "2026-01-01T00:00:00Z"}\n'
        )
        for shape in ("stateless", "stateful", "windowed"):
            setup = Setup(folder, sink="sqlite", shape=shape, checkpoint=f"{folder}/{shape}")
            spark = session(setup)
            table = semel.Sqlite(f"{folder}/{shape}.db", "out")
            made = replace(writer(setup, spark), sinks=(table,), name=shape)
            made.start().awaitTermination()
        setup = Setup(
            folder, "kafka", servers=cluster.bootstrap, topics=("in", "out"), checkpoint=f"{folder}/kafka-out"
        )
        _make_topics(setup)
        writer(setup, spark).start().awaitTermination()
        spark.stop()


def _make_topics(setup: Setup) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    client = AdminClient({"bootstrap.servers": setup.servers})
    for future in client.create_topics([NewTopic(topic, 1) for topic in setup.topics]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": setup.servers})
    producer.produce(setup.topics[0], b"", key=b"1")
    producer.flush(30)


def arguments(setup: Setup) -> list[str]:
    """The command line that runs this setup."""
    return [sys.executable, str(Path(__file__)), json.dumps(asdict(setup))]


if __name__ == "__main__":
    if sys.argv[1] == "--load-classes":
        load_classes()
        sys.exit(0)
    code = main()
    # A driver that ends must not wait for threads of a cluster that a test has killed.
    sys.stdout.flush()
    os._exit(code)
