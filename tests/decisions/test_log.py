"""The decision log over every store."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.decisions import log as log_module
from semel.decisions.base import RecordStore
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.decisions.records import decode, encode, journal_entry, parse_journal_entry
from semel.errors import CheckpointError, CorruptRecord, NewerRecord
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Aborted, Committable, Decided, Record, Started

PIPELINE = PipelineId("00000000-0000-0000-0000-000000000001")
SLOT = "decisions/0000000042.0.json"
SECOND_LINE = "  the data now: this start wrote nothing; what was visible before still is"
RESTORE = (
    "  what to do: Restore the file from a copy of the checkpoint. "
    "Do not delete it: it may hold the decision of a batch."
)


@pytest.fixture
def log(store: RecordStore) -> DecisionLog:
    return DecisionLog(store)


def attempt(slot: int = 0, batch: int = 42, incarnation: int = 1) -> Attempt:
    return Attempt(PIPELINE, batch, slot, Incarnation(incarnation))


def decision(slot: int = 0, batch: int = 42, *, mends: bool = False) -> Decided:
    a = attempt(slot, batch)
    branches = (str(Branch(a, "orders", 0, 0)),)
    c = Committable("orders", "orders", a, 3, branches, {"rows": ["ä", None, 1.5]}, "3:00c0ffee", mends)
    return Decided(a, (c,), mends)


def overwrite(store: RecordStore, path: str, content: bytes) -> None:
    store.delete(path)
    assert store.create(path, content)


# Who runs it ----------------------------------------------------------------------------------------------------------


def test_nobody_has_claimed_a_fresh_log(log: DecisionLog) -> None:
    assert log.newest_claim() == 0


def test_claims_count_from_one_and_each_supersedes_the_one_before(log: DecisionLog) -> None:
    first = log.claim()
    assert (first, log.newest_claim(), log.superseded(first)) == (1, 1, False)
    second = log.claim()
    assert (second, log.newest_claim()) == (2, 2)
    assert (log.superseded(first), log.superseded(second)) == (True, False)


def test_concurrent_claims_are_dense_and_unique(log: DecisionLog) -> None:
    claimants, each = 4, 2
    barrier = threading.Barrier(claimants)

    def claim(_: int) -> list[int]:
        barrier.wait(timeout=30)
        return [log.claim() for _ in range(each)]

    with ThreadPoolExecutor(max_workers=claimants) as pool:
        claims = [incarnation for mine in pool.map(claim, range(claimants)) for incarnation in mine]
    assert sorted(claims) == list(range(1, claimants * each + 1))
    assert [log.superseded(claim) for claim in sorted(claims)] == [True] * (len(claims) - 1) + [False]


def test_a_claim_says_who_made_it(log: DecisionLog, store: RecordStore) -> None:
    log.claim(why="test")
    body = decode(store.read("incarnations/0000000001.json") or b"", "here")
    assert set(body) == {"incarnation", "host", "pid", "machine", "born", "claimed_at", "token", "why"}
    assert log.holder(1) == f"pid {body['pid']} on {body['host']} since {body['claimed_at']}"
    assert log.holder(9) == "pid ? on ? since ?"


def test_two_claims_of_one_process_at_one_moment_are_not_the_same_bytes(
    log: DecisionLog, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an answer is lost, the bytes say whose record it is: no two creators may write the same."""
    monkeypatch.setattr(log_module, "_now", lambda: "now")
    bodies = [decode(store.read(f"incarnations/{log.claim():010d}.json") or b"", "here") for _ in range(2)]
    assert [body.pop("incarnation") for body in bodies] == [1, 2]
    assert len({body.pop("token") for body in bodies}) == 2
    assert bodies[0] == bodies[1]


def test_what_another_process_decided_is_durable_before_it_is_returned(
    log: DecisionLog, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could take back a decision that was found, and committed forward, a moment before."""
    log.create_identity(Identity(PIPELINE, "orders"))
    for slot in range(2):
        assert log.append(Aborted(attempt(slot)))
    asked: list[str] = []
    monkeypatch.setattr(store, "make_durable", asked.append)
    assert len(log.journal(42)) == 2
    assert asked == [SLOT, "decisions/0000000042.1.json"]
    assert log.identity() == Identity(PIPELINE, "orders")
    assert asked[2:] == ["pipeline.json"]
    assert log.journal(43) == ()
    assert len(asked) == 3


def test_when_it_cannot_be_made_durable_it_is_not_returned(
    log: DecisionLog, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(f"cannot sync {path}")

    log.append(Aborted(attempt()))
    monkeypatch.setattr(store, "make_durable", fail)
    with pytest.raises(OSError, match=r"cannot sync decisions/0000000042\.0\.json"):
        log.journal(42)


def test_a_driver_that_slept_until_its_claim_was_pruned_is_still_superseded(
    log: DecisionLog, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "INCARNATIONS_KEPT", 2)
    claims = [log.claim() for _ in range(4)]
    assert store.list("incarnations") == ["0000000003.json", "0000000004.json"]
    assert [log.superseded(claim) for claim in claims] == [True, True, True, False]


def test_a_claimant_that_slept_until_its_number_was_pruned_claims_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "INCARNATIONS_KEPT", 2)
    log = DecisionLog(MemoryStore())
    claims = [log.claim() for _ in range(5)]
    looks = iter([2])  # what it saw before it slept
    look = log.newest_claim
    monkeypatch.setattr(log, "newest_claim", lambda: next(looks, None) or look())
    mine = log.claim()
    assert mine == 6
    assert [log.superseded(claim) for claim in (*claims, mine)] == [True] * 5 + [False]


def test_claiming_gives_up_after_a_limit_that_the_message_names() -> None:
    class Contended(MemoryStore):
        def create(self, *_: object) -> bool:
            return False

    with pytest.raises(CheckpointError) as raised:
        DecisionLog(Contended()).claim()
    assert str(raised.value).splitlines() == [
        "Could not claim the pipeline in 100 tries: other drivers claim memory too.",
        SECOND_LINE,
        "  what to do: Run the pipeline in one place only, then start it again.",
    ]


# Whose log it is ------------------------------------------------------------------------------------------------------


def test_a_fresh_log_belongs_to_nobody(log: DecisionLog) -> None:
    assert log.identity() is None


def test_the_first_name_stays(log: DecisionLog) -> None:
    log.create_identity(Identity(PIPELINE, "orders"))
    log.create_identity(Identity(PipelineId("00000000-0000-0000-0000-000000000002"), "other"))
    assert log.identity() == Identity(PIPELINE, "orders")


def test_an_identity_that_names_nobody_is_corrupt() -> None:
    store = MemoryStore()
    store.create("pipeline.json", encode({"name": "orders"}))
    with pytest.raises(CorruptRecord) as raised:
        DecisionLog(store).identity()
    assert str(raised.value).splitlines() == [
        "The record memory/pipeline.json does not say whose checkpoint this is.",
        SECOND_LINE,
        RESTORE,
    ]


# What was decided -----------------------------------------------------------------------------------------------------


def test_a_batch_without_records_has_an_empty_journal(log: DecisionLog) -> None:
    assert (log.journal(42), log.batches()) == ((), [])


def test_a_journal_keeps_its_order_beyond_ten_slots(log: DecisionLog) -> None:
    records: list[Record] = [Aborted(attempt(slot)) for slot in range(10)]
    records += [decision(10), decision(11, mends=True)]
    assert [log.append(record) for record in records] == [True] * 12
    assert log.journal(42) == tuple(records)


def test_a_taken_slot_is_refused_and_keeps_what_it_holds(log: DecisionLog) -> None:
    assert log.append(Aborted(attempt(0, incarnation=2))) is True
    assert log.append(decision(0)) is False
    assert log.journal(42) == (Aborted(attempt(0, incarnation=2)),)


def test_of_a_decision_and_a_closing_of_the_same_slot_one_wins(log: DecisionLog) -> None:
    rivals: tuple[Record, Record] = (decision(0), Aborted(attempt(0, incarnation=2)))
    barrier = threading.Barrier(2)

    def append(record: Record) -> bool:
        barrier.wait(timeout=30)
        return log.append(record)

    with ThreadPoolExecutor(max_workers=2) as pool:
        won = list(pool.map(append, rivals))
    assert sorted(won) == [False, True]
    assert log.journal(42) == (rivals[won.index(True)],)


def test_pruning_forgets_old_batches_and_only_those(log: DecisionLog) -> None:
    for batch in (7, 8, 9):
        log.append(Aborted(attempt(0, batch)))
        log.append(decision(1, batch))
    assert log.prune(before_batch=9) == 4
    assert log.batches() == [9]
    assert (log.journal(8), len(log.journal(9))) == ((), 2)
    assert log.prune(before_batch=9) == 0


# A digit of another script is a number to Python, and no name of ours.
ARABIC_1 = "\N{ARABIC-INDIC DIGIT ONE}"
STRAYS = ("42.0.json", "0000000042.0.json~")


def test_stray_files_are_ignored_and_left_alone(log: DecisionLog, store: RecordStore) -> None:
    in_decisions = (*STRAYS, "0000000001.json", f"{ARABIC_1:0>10}.0.json")
    in_incarnations = (*STRAYS, "0000000099.1.json")
    for folder, names in (("decisions", in_decisions), ("incarnations", in_incarnations)):
        for name in names:
            store.create(f"{folder}/{name}", b"not ours")
    assert (log.newest_claim(), log.claim(), log.batches()) == (0, 1, [])
    log.append(decision())
    assert (log.batches(), log.journal(42)) == ([42], (decision(),))
    assert log.prune(before_batch=100) == 1
    assert store.list("decisions") == sorted(in_decisions)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_record_is_named_in_three_lines(log: DecisionLog, store: RecordStore) -> None:
    log.append(decision())
    overwrite(store, SLOT, b'{"version": 1, "kind": "deci')
    with pytest.raises(CorruptRecord) as raised:
        log.journal(42)
    assert str(raised.value).splitlines() == [
        f"The record {store.describe()}/{SLOT} is damaged or half-written (28 bytes).",
        SECOND_LINE,
        RESTORE,
    ]


def test_a_changed_record_is_named_in_three_lines(log: DecisionLog, store: RecordStore) -> None:
    log.append(decision())
    overwrite(store, SLOT, (store.read(SLOT) or b"").replace(b'"rows": 3', b'"rows": 4'))
    with pytest.raises(CorruptRecord) as raised:
        log.journal(42)
    assert str(raised.value).splitlines() == [
        f"The record {store.describe()}/{SLOT} does not match its checksum.",
        SECOND_LINE,
        RESTORE,
    ]


def test_a_record_that_lacks_something_is_named_in_three_lines() -> None:
    store = MemoryStore()
    store.create(SLOT, encode({"kind": "decided", "pipeline": PIPELINE, "batch": 42, "attempt": 0, "incarnation": 1}))
    with pytest.raises(CorruptRecord) as raised:
        DecisionLog(store).journal(42)
    assert str(raised.value).splitlines() == [
        f"The record memory/{SLOT} lacks what a journal entry needs: KeyError('committables').",
        SECOND_LINE,
        RESTORE,
    ]


def test_a_record_of_a_newer_semel_is_named_in_three_lines(log: DecisionLog, store: RecordStore) -> None:
    store.create(SLOT, encode({"version": 3, "kind": "postponed"}))
    with pytest.raises(NewerRecord) as raised:
        log.journal(42)
    assert str(raised.value).splitlines() == [
        f"The record {store.describe()}/{SLOT} has version 3; this semel reads up to 2.",
        SECOND_LINE,
        "  what to do: Run this pipeline with the newer semel that wrote the record.",
    ]


@pytest.mark.parametrize("record", [decision(), Aborted(attempt()), Started(attempt())], ids=lambda r: type(r).__name__)
def test_a_record_cut_at_any_length_is_corrupt(record: Record) -> None:
    whole = journal_entry(record, "now")
    # The last byte is the end of the line: without it the record is still whole.
    assert whole.endswith(b"}\n")
    assert len(whole) > 200
    for length in range(len(whole) - 1):
        with pytest.raises(CorruptRecord) as raised:
            parse_journal_entry(whole[:length], SLOT)
        assert len(str(raised.value).splitlines()) == 3
    assert parse_journal_entry(whole[:-1], SLOT) == record


def test_a_record_with_any_byte_flipped_is_corrupt() -> None:
    whole = journal_entry(decision(), "now")
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        with pytest.raises(CorruptRecord) as raised:
            parse_journal_entry(bytes(flipped), SLOT)
        assert len(str(raised.value).splitlines()) == 3
    assert parse_journal_entry(whole, SLOT) == decision()


@given(data=st.data())
def test_a_record_with_any_bytes_replaced_is_never_misread(data: st.DataObject) -> None:
    whole = journal_entry(decision(), "now")
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damaged = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    try:
        read: Record | None = parse_journal_entry(damaged, SLOT)
    except (CorruptRecord, NewerRecord):
        read = None
    # What still reads differs at most in white space.
    assert read in (None, decision())


# Round trips ----------------------------------------------------------------------------------------------------------

numbers = st.integers(0, 2**40)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
attempts = st.builds(
    Attempt,
    st.uuids().map(lambda u: PipelineId(str(u))),
    numbers,
    st.integers(0, 99),
    numbers.map(Incarnation),
)
committables = st.builds(
    Committable,
    sink=st.text(),
    key=st.text(),
    attempt=attempts,
    rows=numbers,
    branches=st.lists(st.text(), max_size=3).map(tuple),
    payload=st.dictionaries(st.text(), json_values, max_size=3),
    fingerprint=st.text(),
    mends=st.booleans(),
)
decisions = st.builds(Decided, attempts, st.lists(committables, max_size=3).map(tuple), st.booleans())
records: st.SearchStrategy[Record] = decisions | st.builds(Aborted, attempts) | st.builds(Started, attempts)


@given(records)
def test_every_record_survives_the_way_to_bytes_and_back(record: Record) -> None:
    assert parse_journal_entry(journal_entry(record, "now"), SLOT) == record


@given(records)
def test_every_record_survives_the_log(record: Record) -> None:
    log = DecisionLog(MemoryStore())
    log.store.create("unrelated", b"")
    first = type(record)(**{**vars(record), "attempt": attempt(0)})
    assert log.append(first)
    assert log.journal(42) == (first,)


def test_a_payload_with_numbers_as_keys_can_be_read_back() -> None:
    # JSON has no such keys, and they sort differently as text: the checksum must be of what a reader finds.
    body = {"payload": {10: "ten", 9: "nine"}}
    assert decode(encode(body), "here") == {"payload": {"10": "ten", "9": "nine"}}


def test_a_record_is_json_that_a_person_can_read() -> None:
    text = journal_entry(decision(), "now").decode()
    assert '\n  "kind": "decided",\n' in text
    assert "ä" in text
    assert json.loads(text)["version"] == 2
