"""Flink with EXACTLY_ONCE, in its own JVM: SQL that is made here, rows that never see Python.

python -m benchmarks.engines.flink_job '<job>'
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.talk import ENDED, FAILED, SESSION, STARTED, STOP, Job, tell, words

#: A broker gives a transaction 15 minutes at most, and Flink asks for an hour unless told otherwise.
TRANSACTION_TIMEOUT_MS = "600000"
START_S_MAX = 60.0
BACKENDS = {"hdfs": "hashmap", "rocksdb": "rocksdb"}


def settings_of(job: Job) -> dict[str, str]:
    settings = {
        "pipeline.jars": ";".join(f"file://{jar}" for jar in job.jars),
        "execution.checkpointing.interval": f"{job.commit_ms} ms",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.storage": "filesystem",
        "execution.checkpointing.dir": f"file://{job.folder}/checkpoints",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "state.backend.type": BACKENDS[job.state],
        "rest.address": "127.0.0.1",
        "rest.bind-address": "127.0.0.1",
        "rest.bind-port": "0",
    }
    newest = newest_checkpoint(Path(job.folder))
    if newest is not None:
        settings["execution.state-recovery.path"] = f"file://{newest}"
    return settings | job.settings


def newest_checkpoint(folder: Path) -> Path | None:
    """After a crash: the last one that is whole, of whatever life of the job."""
    whole = sorted(folder.glob("checkpoints/*/chk-*/_metadata"), key=lambda file: file.stat().st_mtime_ns)
    return whole[-1].parent if whole else None


def tables(job: Job) -> list[str]:
    common = f"'properties.bootstrap.servers' = '{job.servers}'"
    source = f"""CREATE TABLE rows_in (k {"STRING" if job.count else "BYTES"}, v BYTES) WITH (
        'connector' = 'kafka', 'topic' = '{job.input}', {common}, 'properties.group.id' = 'bench-flink',
        'properties.isolation.level' = 'read_committed', 'scan.startup.mode' = 'earliest-offset',
        'key.format' = 'raw', 'key.fields' = 'k', 'value.format' = 'raw', 'value.fields-include' = 'EXCEPT_KEY')"""
    return [source, *(_sink(job, number, topic, common) for number, topic in enumerate(job.outputs))]


def _sink(job: Job, number: int, topic: str, common: str) -> str:
    exactly = f"""'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = '{topic}',
        'properties.transaction.timeout.ms' = '{TRANSACTION_TIMEOUT_MS}'"""
    if job.count:
        return f"""CREATE TABLE sink_{number} (k STRING, v STRING, PRIMARY KEY (k) NOT ENFORCED) WITH (
            'connector' = 'upsert-kafka', 'topic' = '{topic}', {common}, {exactly},
            'key.format' = 'raw', 'value.format' = 'raw')"""
    return f"""CREATE TABLE sink_{number} (k BYTES, v BYTES) WITH (
        'connector' = 'kafka', 'topic' = '{topic}', {common}, {exactly},
        'key.format' = 'raw', 'key.fields' = 'k', 'value.format' = 'raw', 'value.fields-include' = 'EXCEPT_KEY')"""


def query(job: Job, number: int) -> str:
    rows = "SELECT k, CAST(COUNT(*) AS STRING) FROM rows_in GROUP BY k" if job.count else "SELECT k, v FROM rows_in"
    return f"INSERT INTO sink_{number} {rows}"


def start(job: Job) -> Any:
    from pyflink.common import Configuration
    from pyflink.table import EnvironmentSettings, TableEnvironment

    configuration = Configuration()
    for name, value in settings_of(job).items():
        configuration.set_string(name, value)
    chosen = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    environment = TableEnvironment.create(chosen)
    tell(SESSION)
    for statement in tables(job):
        environment.execute_sql(statement)
    statements = environment.create_statement_set()
    for number in range(len(job.outputs)):
        statements.add_insert_sql(query(job, number))
    client = statements.execute().get_job_client()
    deadline = time.monotonic() + START_S_MAX
    while _state(client) != "RUNNING":
        if time.monotonic() > deadline or _state(client) in ("FAILED", "CANCELED"):
            raise RuntimeError(f"Flink's job is {_state(client)}")
        time.sleep(0.02)
    return client


def _state(client: Any) -> str:
    return str(client.get_job_status().result().name)


def _watch(client: Any) -> None:
    """A job that breaks by itself is told of at once; Flink would try it again and again."""
    while True:
        state = _state(client)
        if state not in ("RUNNING", "CREATED"):
            tell(FAILED, error=f"Flink's job is {state}")
            return
        time.sleep(1)


def main() -> None:
    job = Job.from_json(sys.argv[1])
    client = start(job)
    tell(STARTED)
    threading.Thread(target=_watch, args=(client,), daemon=True).start()
    for word in words():
        if word == STOP:
            tell(ENDED)
            client.cancel().result()
            break


if __name__ == "__main__":
    main()
