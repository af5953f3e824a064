"""The decision log over any record store."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from semel.decisions.base import RecordStore
from semel.decisions.records import decode, encode, journal_entry, parse_journal_entry
from semel.errors import CheckpointError, CorruptRecord
from semel.ids import Incarnation, PipelineId
from semel.process import this_process
from semel.protocol.events import Journal, Record

CLAIM_TRIES_MAX = 100
INCARNATIONS_KEPT = 100
_NUMBERED = {
    "incarnations": re.compile(r"([0-9]{10})\.json"),
    "left": re.compile(r"([0-9]{10})\.json"),
    "decisions": re.compile(r"([0-9]{10})\.[0-9]+\.json"),
}


@dataclass(frozen=True)
class Identity:
    """Whose log this is. `name` is empty when the user gave none; then sinks know the pipeline by `known_by`."""

    pipeline: PipelineId
    name: str = ""
    known_by: str = ""


class DecisionLog:
    """Create-if-absent records, in the layout that `semel.decisions` describes."""

    def __init__(self, store: RecordStore) -> None:
        self.store = store

    # Whose log it is ------------------------------------------------------------------------------------------------

    def identity(self) -> Identity | None:
        """What `pipeline.json` says, or None in a fresh log."""
        body = self._read("pipeline.json")
        if body is None:
            return None
        self.store.make_durable("pipeline.json")
        return Identity(PipelineId(body["pipeline"]), body["name"])

    def create_identity(self, identity: Identity) -> None:
        """Put a name on a fresh log. A racing twin writes the same, so a lost race is no error."""
        self.store.create(
            "pipeline.json", encode({"pipeline": identity.pipeline, "name": identity.name, "created_at": _now()})
        )

    # Who runs it ----------------------------------------------------------------------------------------------------

    def claim(self, **details: Any) -> Incarnation:
        """Become the newest incarnation. The driver that held the pipeline before is fenced from this moment on."""
        # The token tells drivers apart that have the same name and number on two machines, or live in one process.
        holder = {
            **this_process(),
            "claimed_at": _now(),
            "token": _token(),
            **details,
        }
        for _ in range(CLAIM_TRIES_MAX):
            mine = self.newest_claim() + 1
            created = self.store.create(_incarnation_path(mine), encode({"incarnation": mine, **holder}))
            # If we slept between looking and creating, a claim that was pruned may be back: prune once more.
            if created and self.newest_claim() - mine < INCARNATIONS_KEPT:
                self._prune_claims(mine)
                return Incarnation(mine)
        raise CheckpointError(
            f"Could not claim the pipeline in {CLAIM_TRIES_MAX} tries: "
            f"other drivers claim {self.store.describe()} too.",
            remedy="Run the pipeline in one place only, then start it again.",
        )

    def newest_claim(self) -> int:
        """The newest incarnation that anybody claimed; 0 when nobody did."""
        return max(self._numbered("incarnations").values(), default=0)

    def superseded(self, incarnation: int) -> bool:
        """Whether somebody claimed after us. Claims are dense, so the next one tells, or that ours has been pruned.

        Old claims are deleted oldest first: when the next one is gone already, ours went before it.
        """
        return self.store.exists(_incarnation_path(incarnation + 1)) or not self.store.exists(
            _incarnation_path(incarnation)
        )

    def holder(self, incarnation: int) -> str:
        """Who made a claim, for messages."""
        body = self.claimed(incarnation)
        return f"pid {body.get('pid', '?')} on {body.get('host', '?')} since {body.get('claimed_at', '?')}"

    def claimed(self, incarnation: int) -> Mapping[str, Any]:
        """What a claim says: whose process it was, since when, and its sinks. Empty when there is none."""
        return self._read(_incarnation_path(incarnation)) or {}

    def leave(self, incarnation: int) -> None:
        """Say that this incarnation is over and writes nothing any more: nobody has to wait for it."""
        self.store.replace(_left_path(incarnation), encode({"incarnation": incarnation, "left_at": _now()}))

    def has_left(self, incarnation: int) -> bool:
        return self.store.exists(_left_path(incarnation))

    # What was decided -----------------------------------------------------------------------------------------------

    def journal(self, batch: int) -> Journal:
        """All slots of a batch, in order. What is returned is durable: a power cut takes nothing of it back."""
        records: list[Record] = []
        while (content := self.store.read(path := _slot_path(batch, len(records)))) is not None:
            where = f"{self.store.describe()}/{path}"
            record = parse_journal_entry(content, where)
            if (record.attempt.batch, record.attempt.attempt) != (batch, len(records)):
                raise CorruptRecord(f"The record {where} was written as {record.attempt}: it lies under a wrong name.")
            records.append(record)
        for slot in range(len(records)):
            self.store.make_durable(_slot_path(batch, slot))
        return tuple(records)

    def append(self, record: Record) -> bool:
        """Put a record into its slot. False when the slot is taken."""
        attempt = record.attempt
        return self.store.create(_slot_path(attempt.batch, attempt.attempt), journal_entry(record, _now()))

    def batches(self) -> list[int]:
        """The batches that have a journal."""
        return sorted(set(self._numbered("decisions").values()))

    def prune(self, before_batch: int) -> int:
        """Forget the journals of old batches; the caller knows that they are checkpointed. Returns how many files."""
        old = [name for name, batch in self._numbered("decisions").items() if batch < before_batch]
        for name in old:
            self.store.delete(f"decisions/{name}")
        return len(old)

    def _prune_claims(self, mine: int) -> None:
        for folder in ("left", "incarnations"):
            for name, incarnation in self._numbered(folder).items():
                if incarnation <= mine - INCARNATIONS_KEPT:
                    self.store.delete(f"{folder}/{name}")

    def _numbered(self, folder: str) -> dict[str, int]:
        """The files of a folder with the number that their names begin with. Somebody else's files are left alone."""
        matches = ((name, _NUMBERED[folder].fullmatch(name)) for name in self.store.list(folder))
        return {name: int(match[1]) for name, match in matches if match}

    def _read(self, path: str) -> dict[str, Any] | None:
        content = self.store.read(path)
        if content is None:
            return None
        body = decode(content, f"{self.store.describe()}/{path}")
        if path == "pipeline.json" and not {"pipeline", "name"} <= set(body):
            raise CorruptRecord(f"The record {self.store.describe()}/{path} does not say whose checkpoint this is.")
        return body


def _incarnation_path(incarnation: int) -> str:
    return f"incarnations/{incarnation:010d}.json"


def _left_path(incarnation: int) -> str:
    return f"left/{incarnation:010d}.json"


def _slot_path(batch: int, slot: int) -> str:
    return f"decisions/{batch:010d}.{slot}.json"


def _token() -> str:
    return uuid.uuid4().hex


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
