"""Records as bytes: indented JSON that a person can read, with a version and a checksum that a program checks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from semel import formats
from semel.errors import CorruptRecord, NewerRecord
from semel.ids import Attempt, Incarnation, pipeline_id
from semel.protocol.events import Aborted, Committable, Decided, Record, Started
from semel.protocol.plans import Plan, PlannedFile

#: 1: no plan in a decision, none in a committable.
VERSION = 2


def encode(body: Mapping[str, Any]) -> bytes:
    """One record. The checksum covers everything else in it, as a reader finds it: JSON knows no number as a key."""
    whole = json.loads(json.dumps({"version": VERSION, **body}))
    return (json.dumps({**whole, "checksum": _checksum(whole)}, indent=2, ensure_ascii=False) + "\n").encode()


def decode(content: bytes, where: str) -> dict[str, Any]:
    """The body of a record, or an error that names the file: a damaged record is never guessed at."""
    try:
        whole = json.loads(content)
        found = whole.pop("checksum")
        version = whole["version"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CorruptRecord(f"The record {where} is damaged or half-written ({len(content)} bytes).") from None
    if found != _checksum(whole):
        raise CorruptRecord(f"The record {where} does not match its checksum.")
    if not isinstance(version, int) or version > VERSION:
        raise NewerRecord(f"The record {where} has version {version}; this semel reads up to {VERSION}.")
    del whole["version"]
    return dict(whole)


def _checksum(whole: Mapping[str, Any]) -> str:
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


_KINDS: dict[str, type[Record]] = {"aborted": Aborted, "decided": Decided, "started": Started}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def journal_entry(record: Record, recorded_at: str) -> bytes:
    """A slot of a batch's journal."""
    a = record.attempt
    body: dict[str, Any] = {
        "kind": _NAMES[type(record)],
        "pipeline": a.pipeline,
        "batch": a.batch,
        "attempt": a.attempt,
        "incarnation": a.incarnation,
        "recorded_at": recorded_at,
    }
    if isinstance(record, Decided):
        body |= {"mends": record.mends, "committables": [committable_to_json(c) for c in record.committables]}
        if record.plan is not None:
            body["plan"] = _plan_to_json(record.plan)
    return encode(body)


def parse_journal_entry(content: bytes, where: str) -> Record:
    body = decode(content, where)
    try:
        attempt = _attempt(body)
        kind = _KINDS[body["kind"]]
        if kind is not Decided:
            return kind(attempt)  # type: ignore[call-arg]
        plan = _plan_from_json(body["plan"]) if "plan" in body else None
        return Decided(attempt, tuple(map(committable_from_json, body["committables"])), body["mends"], plan)
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptRecord(f"The record {where} lacks what a journal entry needs: {error!r}.") from None


def committable_to_json(c: Committable) -> dict[str, Any]:
    a = c.attempt
    return {
        "sink": c.sink,
        "key": c.key,
        "pipeline": a.pipeline,
        "batch": a.batch,
        "attempt": a.attempt,
        "incarnation": a.incarnation,
        "rows": c.rows,
        "branches": list(c.branches),
        "payload": dict(c.payload),
        "fingerprint": c.fingerprint,
        "mends": c.mends,
        "plan": c.plan,
        "format": c.format,
    }


def committable_from_json(body: Mapping[str, Any]) -> Committable:
    number = body.get("format", formats.FIRST)
    what = f"The committable {body['key']} of batch {body['batch']} for sink {body['sink']}"
    formats.refuse_newer(what, number, formats.COMMITTABLE)
    return Committable(
        sink=body["sink"],
        key=body["key"],
        attempt=_attempt(body),
        rows=body["rows"],
        branches=tuple(body["branches"]),
        payload=body["payload"],
        fingerprint=body["fingerprint"],
        mends=body["mends"],
        plan=body.get("plan", ""),
        format=number,
    )


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    return {"digest": plan.digest, "files": [vars(f) for f in plan.files], "before": [vars(f) for f in plan.before]}


def _plan_from_json(body: Mapping[str, Any]) -> Plan:
    return Plan(tuple(PlannedFile(**f) for f in body["files"]), tuple(PlannedFile(**f) for f in body["before"]))


def _attempt(body: Mapping[str, Any]) -> Attempt:
    return Attempt(
        pipeline_id(body["pipeline"]), int(body["batch"]), int(body["attempt"]), Incarnation(int(body["incarnation"]))
    )
