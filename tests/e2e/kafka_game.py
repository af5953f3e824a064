"""Kafka to Kafka with known input, run in a child process that is killed, with a reader that watches the output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.ids import parse_branch, to_sink_name
from semel.protocol.events import Decided
from semel.sinks.kafka.markers import MarkerLog, partition_of
from semel.sinks.kafka.wire.requests import LogRecord, Transaction
from tests.e2e.child import NO_TASK
from tests.e2e.game import Life, Lives
from tests.e2e.kafka_audit import PARTITIONS, BatchPlan, Findings, Sight, audit
from tests.e2e.watcher import Watcher
from tests.kafka_world import KafkaWorld
from tests.processes import is_stopped, wait_until

PRODUCE_TIMEOUT_S = 60.0
STOP_SECONDS_MAX = 120
#: That the broker is away is what these tests do, and not worth a line.
QUIET = {"log_level": "0"}
#: Spark forgets the offsets of old batches after a hundred; the audit needs all of them.
KEEP_OFFSETS = ("spark.sql.streaming.minBatchesToRetain", "100000")


@dataclass
class KafkaGame(Lives):
    """`setup.servers` is how the child reaches the broker, `servers` how we do: a proxy may lie between the two."""

    servers: str = ""
    dealt: int = 0
    world: KafkaWorld = field(init=False)
    watcher: Watcher = field(init=False)
    _decided_at: dict[tuple[int, int], float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.servers = self.servers or self.setup.servers
        self.world = KafkaWorld(self.servers, QUIET)
        suffix = uuid.uuid4().hex[:8]
        self.setup = replace(
            self.setup,
            sink="kafka",
            topics=(self.setup.topics[0] or f"in-{suffix}", self.setup.topics[1] or f"out-{suffix}"),
            conf=(*self.setup.conf, KEEP_OFFSETS),
        )
        self.folder.mkdir(parents=True)
        self.world.create_topics(*self.setup.topics, partitions=PARTITIONS)
        self.watcher = Watcher(self.servers, self.setup.topics[1], PARTITIONS)
        self.watcher.start()

    @property
    def batches(self) -> int:
        """How many batches the input that was dealt makes."""
        return -(-self.dealt // self.setup.rows_per_batch)

    @property
    def sink(self) -> str:
        return to_sink_name(f"kafka_{self.setup.topics[1]}")

    def deal(self, batches: int) -> KafkaGame:
        """Append that many batches of input. Ids go round the partitions, so an id tells where its row lies."""
        return self.deal_rows(batches * self.setup.rows_per_batch)

    def deal_rows(self, rows: int) -> KafkaGame:
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 5, **QUIET})
        failed: list[str] = []
        for number in range(self.dealt, self.dealt + rows):
            producer.produce(
                self.setup.topics[0],
                b"",
                key=str(number).encode(),
                partition=number % PARTITIONS,
                on_delivery=lambda error, _: failed.append(error.str()) if error else None,
            )
            producer.poll(0)
        assert producer.flush(PRODUCE_TIMEOUT_S) == 0
        assert failed == []
        self.dealt += rows
        return self

    def end(self) -> None:
        super().end()
        self.watcher.stop()
        self.world.close()

    # Looking ----------------------------------------------------------------------------------------------------------

    def committed(self) -> int:
        """How many rows a reader sees; fails unless each is there once, in whole batches, and decided."""
        sights, findings = self.look()
        if not sights:
            assert findings.counts == dict.fromkeys(findings.counts, 0)
            return 0
        findings.require_clean(len(sights))
        return len(sights)

    def look(self) -> tuple[list[Sight], Findings]:
        """What a reader sees once no transaction is being ended, and what is wrong with it."""
        # First what is open, then what is seen: of what ends meanwhile everything is seen.
        self.world.wait_until_ended()
        settled = self.open_transactions() == []
        sights = self.watcher.caught_up()
        return sights, audit(sights, self.plan(), self.decided_at(), settled=settled)

    def require_exactly_once(self) -> Findings:
        """After the end: every row once, nothing open, and no two transactions under one producer id and epoch."""
        self.world.wait_until_ended()
        assert self.open_transactions() == []
        findings = self.findings()
        findings.require_clean(self.dealt)
        assert self.shared_epochs() == []
        return findings

    def require_good_end(self, life: Life) -> Life:
        """The last life ended by itself, and has left every row once."""
        assert life.returncode == 0, life
        self.require_exactly_once()
        return life

    def findings(self) -> Findings:
        """All input that was dealt against all output."""
        return audit(self.watcher.caught_up(), self.plan(), self.decided_at(), rows=self.dealt)

    def plan(self) -> BatchPlan:
        """What Spark wrote into offsets/N: a version, a line about itself, then a line per source."""
        folder = self.checkpoint / "offsets"
        numbers = sorted(int(p.name) for p in folder.glob("[0-9]*")) if folder.is_dir() else []
        assert numbers == list(range(len(numbers))), "Spark has forgotten the offsets of old batches"
        sources = (json.loads((folder / str(n)).read_text().splitlines()[2]) for n in numbers)
        return BatchPlan.of([{int(p): at for p, at in s[self.setup.topics[0]].items()} for s in sources])

    def decided_at(self) -> dict[tuple[int, int], float]:
        """When each batch and task was decided: the time of the file, the last one that names the task.

        For rows that do not say which task wrote them it is the time of the batch's first decision.
        """
        log = DecisionLog(FileStore(self.checkpoint / "semel"))
        for batch in log.batches():
            for slot, record in enumerate(log.journal(batch)):
                if isinstance(record, Decided):
                    at = (self.checkpoint / "semel" / "decisions" / f"{batch:010d}.{slot}.json").stat().st_mtime
                    branches = (parse_branch(name) for c in record.committables for name in c.branches)
                    tasks = {branch.task for branch in branches if branch}
                    if len(tasks) == 1 and not record.mends:
                        # One wrote all of the partitions, and rows say which of them they are from.
                        tasks |= set(range(PARTITIONS))
                    self._decided_at |= {(batch, task): at for task in tasks}
                    self._decided_at.setdefault((batch, NO_TASK), at)
        # Journals of old batches are pruned, so what was read once is kept.
        return self._decided_at

    def decisions(self, batch: int) -> list[Decided]:
        journal = DecisionLog(FileStore(self.checkpoint / "semel")).journal(batch)
        return [record for record in journal if isinstance(record, Decided)]

    # Transactions -----------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """What the transactional ids of the pipeline begin with; unknown before its first start."""
        with suppress(FileNotFoundError):
            return f"semel-{json.loads((self.checkpoint / 'metadata').read_text())['id']}-"
        return "semel-unknown-"

    def open_transactions(self) -> list[str]:
        return [name for name in self.world.open_transactions() if name.startswith(self.prefix)]

    def left_behind(self) -> list[str]:
        """What a pipeline that has ended should not leave."""
        return self.open_transactions()

    def wrong_elsewhere(self) -> dict[str, list[str]]:
        """What is wrong with other stores than the output topic, by kind."""
        return {}

    def coordinator(self, transactional_id: str) -> int:
        """The broker that keeps the transactions of an id."""
        from kafka.protocol.metadata import CoordinatorType

        client, kind = self.world.wire._client, CoordinatorType.TRANSACTION
        return int(client._manager.run(lambda: client._find_coordinator_id(transactional_id, key_type=kind)))

    def marker_log(self) -> MarkerLog:
        return self.world.marker_log(self.sink)

    def transactions(self) -> list[Transaction]:
        """Every transaction that left a marker, in the order in which they were prepared."""
        return list(self._marked())

    def _marked(self) -> Iterator[Transaction]:
        position, end, wire = 0, 1, self.world.wire
        while position < end:
            found = wire.read(self.world.control_topic, partition_of(self.sink), position)
            for entry in found.entries:
                # Other tests write to the control topic what is no marker.
                if isinstance(entry, LogRecord) and (entry.value or b"").startswith(b"{"):
                    name = json.loads(entry.value or b"").get("id", "")
                    if name.startswith(self.prefix):
                        yield Transaction(name, entry.producer_id, entry.epoch)
            if found.next_offset == position:
                return
            position, end = found.next_offset, found.end

    def shared_epochs(self) -> list[Transaction]:
        """Transactions whose producer id and epoch another one had: a late EndTxn could hit it (KAFKA-17754)."""
        seen: set[tuple[int, int]] = set()
        shared = []
        for transaction in self.transactions():
            pair = transaction.producer_id, transaction.epoch
            shared += [transaction] if pair in seen else []
            seen.add(pair)
        assert seen, "no transaction left a marker"
        return shared

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def copy_checkpoint(self, target: Path) -> None:
        shutil.copytree(self.checkpoint, target)

    def restore_checkpoint(self, source: Path) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(source, self.checkpoint)

    # Parts of a life --------------------------------------------------------------------------------------------------

    def events(self, child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        """What a child says, as it says it."""
        for line in child.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)

    def wait_until_stopped(self, child: subprocess.Popen[str]) -> None:
        """At a failpoint."""
        wait_until(lambda: child.poll() is not None or is_stopped(child.pid), STOP_SECONDS_MAX)
        assert child.poll() is None, child.communicate()

    def wake(self, child: subprocess.Popen[str]) -> None:
        os.killpg(child.pid, signal.SIGCONT)


def forwarded(life: Life) -> list[tuple[int, bool]]:
    """The batches that were decided in an earlier life, and whether this one had to write their rows again."""
    return [(event["batch"], event["staged"]) for event in life.events if event.get("how") == "forwarded"]
