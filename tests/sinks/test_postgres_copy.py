"""Arrow columns into PostgreSQL's binary COPY: every type, every corner, compared by what the server gives back."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Context as DecimalContext
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.dev.postgres import PostgresServer
from semel.sinks.postgres import copy as postgres_copy
from semel.sinks.postgres.connection import quote
from semel.sinks.postgres.copy import HEADER, TRAILER, Unfit, encode_rows
from semel.sinks.postgres.store import columns_of
from semel.sinks.postgres.types import encoder

UTC = timezone.utc
EXACT = DecimalContext(prec=60)
INT64 = 2**63


@pytest.fixture(scope="module")
def session(postgres_server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_server.url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("CREATE SCHEMA copying")
        connection.execute("SET search_path TO copying, public")
        connection.execute("SET timezone TO 'UTC'")
        connection.execute("CREATE EXTENSION IF NOT EXISTS citext")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'très content', '')")
        connection.execute("CREATE DOMAIN positive AS int4 CHECK (VALUE > 0)")
        connection.execute("CREATE DOMAIN very_positive AS positive CHECK (VALUE > 10)")
        connection.execute("CREATE DOMAIN tags AS text[]")
        yield connection
        connection.execute("DROP SCHEMA copying CASCADE")


def copied(
    session: psycopg.Connection[Any], types: Sequence[str], *batches: pa.RecordBatch, read: str = "*"
) -> list[Any]:
    """What a table of these types holds after the batches were copied into it."""
    names = batches[0].schema.names
    session.execute("DROP TABLE IF EXISTS t")
    session.execute(f"CREATE TABLE t ({', '.join(f'{quote(n)} {t}' for n, t in zip(names, types, strict=True))})")
    columns = columns_of(session, "t")
    encoders = [encoder(field.type, column) for field, column in zip(batches[0].schema, columns, strict=True)]
    assert None not in encoders
    with session.cursor() as cursor, cursor.copy("COPY t FROM STDIN (FORMAT binary)") as copy:
        copy.write(HEADER)
        for batch in batches:
            for data in encode_rows(batch, encoders):  # type: ignore[arg-type]
                copy.write(memoryview(data))
        copy.write(TRAILER)
    # As text, a float of 32 bits has the fewest digits that tell it from others of 32 bits.
    return session.execute(f"SELECT {read} FROM t", binary="float4" in types).fetchall()  # noqa: S608 - ours


def one(session: psycopg.Connection[Any], kind: str, arrow: Any, values: Sequence[Any], read: str = "x") -> list[Any]:
    """Values through one column, three times: as they are, between nulls, and in slices of a larger batch."""
    array = pa.array(values, arrow)
    plain = [row[0] for row in copied(session, [kind], pa.RecordBatch.from_arrays([array], ["x"]), read=read)]
    mixed = [None, *(v for value in values for v in (value, None)), None]
    batch = pa.RecordBatch.from_arrays([pa.array(mixed, arrow)], ["x"])
    slices = [batch.slice(0, 1), batch.slice(1, 2), batch.slice(3)]
    for found in (copied(session, [kind], batch, read=read), copied(session, [kind], *slices, read=read)):
        assert repr([row[0] for row in found[1:-1:2]]) == repr(plain)
        assert [row[0] for row in found[::2]] == [None] * (len(values) + 1)
    return plain


# Values that must come back as they are -------------------------------------------------------------------------------

LONG = "é" * 70_000
TEXTS = ["", "a", "ab\nc\td", "\\N", "\\.", "'; DROP TABLE t; --", "%s {x} $$", "日本語 🎉", LONG]
DATES = [date(1, 1, 1), date(1582, 10, 4), date(1999, 12, 31), date(2000, 1, 1), date(2000, 2, 29), date(9999, 12, 31)]
MOMENTS = [
    datetime(1, 1, 1),
    datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime(2000, 1, 1),
    datetime(2024, 2, 29, 12, 30, 45, 123_456),
    datetime(9999, 12, 31, 23, 59, 59, 999_999),
]
ZONED = [m.replace(tzinfo=UTC) for m in MOMENTS]
INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def edges(bits: int) -> list[int]:
    return [-(2 ** (bits - 1)), -1, 0, 1, 2 ** (bits - 1) - 1]


SAME: list[tuple[str, Any, list[Any]]] = [
    *[(f"int{to // 8}", INTEGERS[bits], edges(min(bits, to))) for bits in INTEGERS for to in (16, 32, 64)],
    *[("numeric", INTEGERS[bits], [Decimal(v) for v in edges(bits)]) for bits in INTEGERS],
    ("float4", pa.float32(), [0.0, -0.0, 1.5, -math.inf, math.inf, 2.0**-149]),
    ("float8", pa.float32(), [0.0, 1.5, -math.inf, math.inf]),
    ("float8", pa.float64(), [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, -math.inf, math.inf]),
    ("bool", pa.bool_(), [True, False, True]),
    *[
        (kind, arrow, TEXTS)
        for kind in ("text", "varchar", "varchar(70000)", "citext")
        for arrow in (pa.string(), pa.large_string())
    ],
    ("name", pa.string(), ["", "a", "x" * 63]),
    ("mood", pa.string(), ["sad", "très content", ""]),
    ("mood", pa.large_string(), ["sad"]),
    ("positive", pa.int64(), [1, 2**31 - 1]),
    ("very_positive", pa.int32(), [11]),
    *[("bytea", arrow, [b"", b"\0", b"\\x00", bytes(range(256))]) for arrow in (pa.binary(), pa.large_binary())],
    ("bytea", pa.binary(3), [b"abc", b"\0\0\0"]),
    ("date", pa.date32(), DATES),
    ("timestamp", pa.timestamp("us"), MOMENTS),
    ("timestamp", pa.timestamp("ms"), [datetime(2024, 2, 29, 12, 30, 45, 123_000)]),
    ("timestamptz", pa.timestamp("us", "UTC"), ZONED),
    ("timestamptz", pa.timestamp("us", "Europe/Berlin"), ZONED[1:-1]),
    ("int8[]", pa.list_(pa.int64()), [[], [1], [None], [None, INT64 - 1, -INT64], [], list(range(1000))]),
    ("int2[]", pa.list_(pa.int8()), [[1, None, -128]]),
    ("text[]", pa.list_(pa.string()), [[], ["", None, "a,b", "{}", "NULL", '"'], [LONG]]),
    ("tags", pa.list_(pa.string()), [["a"], []]),
    ("bool[]", pa.list_(pa.bool_()), [[True, None, False], []]),
    ("float8[]", pa.list_(pa.float64()), [[0.5, None], [math.inf]]),
    ("bytea[]", pa.list_(pa.binary()), [[b"", None, b"\0"]]),
    ("date[]", pa.list_(pa.date32()), [DATES, [None]]),
    ("timestamptz[]", pa.list_(pa.timestamp("us", "UTC")), [ZONED, []]),
    ("numeric(38,10)[]", pa.list_(pa.decimal128(38, 10)), [[Decimal("1.5000000000"), None], []]),
]


@pytest.mark.parametrize(("kind", "arrow", "values"), SAME, ids=[f"{a}-{k}" for k, a, _ in SAME])
def test_values_come_back_as_they_were(
    session: psycopg.Connection[Any], kind: str, arrow: Any, values: list[Any]
) -> None:
    found = one(session, kind, arrow, values)
    assert found == values
    assert [str(v) for v in found] == [str(v) for v in values]


def test_not_a_number_stays_one(session: psycopg.Connection[Any]) -> None:
    for kind, arrow in (("float4", pa.float32()), ("float8", pa.float64())):
        assert all(math.isnan(v) for v in one(session, kind, arrow, [math.nan, -math.nan]))
    ((found,),) = copied(session, ["float8[]"], pa.RecordBatch.from_pylist([{"x": [math.nan, None]}]))
    assert math.isnan(found[0])


def test_all_types_beside_each_other_with_nulls_everywhere(session: psycopg.Connection[Any]) -> None:
    chosen = [entry for entry in SAME if entry[0] != "float4"]
    kinds = [kind for kind, _, _ in chosen]
    longest = max(len(values) for _, _, values in chosen)
    columns = [[*values, *[None] * (longest - len(values))] for _, _, values in chosen]
    # Shifted against each other, so that each has its nulls elsewhere.
    shifted = [[*values[n % longest :], *values[: n % longest]] for n, values in enumerate(columns)]
    arrays = [pa.array(values, arrow) for values, (_, arrow, _) in zip(shifted, chosen, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, [f"c{n}" for n in range(len(arrays))])
    found = copied(session, kinds, batch.slice(0, 1), batch.slice(1, 3), batch.slice(4))
    assert found == list(zip(*shifted, strict=True))
    assert len(found) * len(kinds) > 400


@pytest.mark.parametrize(
    ("kind", "arrow"), [(kind, arrow) for kind, arrow, _ in SAME], ids=[f"{a}-{k}" for k, a, _ in SAME]
)
def test_a_column_of_nulls(session: psycopg.Connection[Any], kind: str, arrow: Any) -> None:
    assert copied(session, [kind], pa.RecordBatch.from_arrays([pa.nulls(3, arrow)], ["x"])) == [(None,)] * 3


# Decimals -------------------------------------------------------------------------------------------------------------


def decimals(precision: int, scale: int) -> list[Decimal]:
    """Edges, and every place of a single digit: with groups of zeros before, between and behind."""
    unscaled = [
        0,
        1,
        10**precision - 1,
        10 ** (precision - 1),
        *(10**n for n in range(precision)),
        1 + 10 ** (precision - 1),
    ]
    unscaled += [int("90" * 19) % 10**precision, int("0001" * 10) % 10**precision, 12_340_000 % 10**precision]
    return [Decimal(sign * value).scaleb(-scale, EXACT) for value in unscaled for sign in (1, -1)]


@pytest.mark.parametrize("precision", [1, 2, 4, 5, 15, 16, 17, 18, 19, 20, 37, 38])
def test_decimals_of_every_scale(session: psycopg.Connection[Any], precision: int) -> None:
    scales = sorted({0, 1, 2, 3, 4, 5, 8, 9, precision // 2, precision - 1, precision} & set(range(precision + 1)))
    if precision == 38:
        scales = list(range(39))
    columns = [decimals(precision, scale) for scale in scales]
    arrays = [pa.array(values, pa.decimal128(precision, scale)) for values, scale in zip(columns, scales, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, [f"s{scale}" for scale in scales])
    found = copied(session, [f"numeric({precision},{s})" for s in scales], batch)
    assert found == list(zip(*columns, strict=True))
    # As many digits behind the point as were sent.
    assert [row.as_tuple().exponent for row in found[0]] == [-scale for scale in scales]
    loose = copied(session, ["numeric"] * len(scales), batch.slice(1))
    assert loose == found[1:]


def test_a_decimal_is_stored_like_one_that_sql_made(session: psycopg.Connection[Any]) -> None:
    """Leading and trailing groups of zeros are no part of a stored number: hashes and sizes would differ."""
    batch = pa.RecordBatch.from_pylist([{"x": Decimal("12.5")}], schema=pa.schema([("x", pa.decimal128(38, 18))]))
    read = "x::text, hash_numeric(x) = hash_numeric(12.5), pg_column_size(x) = pg_column_size(12.5::numeric(38,18)) - 3"
    assert copied(session, ["numeric"], batch, read=read) == [("12.500000000000000000", True, True)]


def test_decimals_under_nulls_are_not_looked_at(session: psycopg.Connection[Any]) -> None:
    """What lies in memory below a null may be anything."""
    values = pa.array([10**17 - 1, 7], pa.int64())
    masked = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x02"), values.buffers()[1]])
    for kind in ("int2", "numeric(3,0)"):
        assert copied(session, [kind], pa.RecordBatch.from_arrays([masked], ["x"])) == [(None,), (7,)]


# What is written in another way ---------------------------------------------------------------------------------------


def test_uuids_in_all_spellings_of_the_server(session: psycopg.Connection[Any]) -> None:
    text = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    hex_ = text.replace("-", "")
    fours = "-".join(hex_[n : n + 4] for n in range(0, 32, 4))
    spellings = [text, text.upper(), hex_, f"{{{text}}}", f"{{{hex_.upper()}}}", fours, "0" * 32, "f" * 32]
    found = one(session, "uuid", pa.string(), spellings)
    assert found == [uuid.UUID(hex_)] * 6 + [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)]
    assert [session.execute("SELECT %s::uuid", (s,)).fetchone() for s in spellings] == [(v,) for v in found]
    ((array,),) = copied(session, ["uuid[]"], pa.RecordBatch.from_pylist([{"x": [text, None]}]))
    assert array == [uuid.UUID(hex_), None]


@pytest.mark.parametrize(
    "wrong", ["", "x", "0" * 31, "0" * 33, "{" + "0" * 32, "0-" * 16 + "0" * 16, "g" * 32, "0" * 32 + "\n"]
)
def test_what_is_no_uuid_is_named(wrong: str) -> None:
    with pytest.raises(Unfit, match=r"column x: .* is not a UUID"):
        encode_rows(pa.RecordBatch.from_pylist([{"x": "0" * 32}, {"x": wrong}]), [postgres_copy.uuids])


def test_json(session: psycopg.Connection[Any]) -> None:
    texts = ['{"a": [1, null, "é"]}', "[]", '""', "null", "1e3"]
    assert one(session, "json", pa.string(), texts, read="x::text") == texts
    assert one(session, "jsonb", pa.string(), texts, read="x::text") == [*texts[:-1], "1000"]
    assert one(session, "jsonb[]", pa.list_(pa.string()), [["{}", None], []], read="x::text") == ['{"{}",NULL}', "{}"]


def test_arrays_of_an_enum(session: psycopg.Connection[Any]) -> None:
    assert one(session, "mood[]", pa.list_(pa.string()), [["sad", None, ""], []], read="x::text[]") == [
        ["sad", None, ""],
        [],
    ]


def test_char_is_padded_by_the_server(session: psycopg.Connection[Any]) -> None:
    assert one(session, "char(3)", pa.string(), ["", "a", "äöü", "abc  "]) == ["   ", "a  ", "äöü", "abc"]


def test_citext_is_equal_in_any_case(session: psycopg.Connection[Any]) -> None:
    assert one(session, "citext", pa.string(), ["ABC"], read="(CASE WHEN x IS NOT NULL THEN x = 'abc' END)") == [True]


def test_moments_beyond_python(session: psycopg.Connection[Any]) -> None:
    """Spark's years go further than Python's, and PostgreSQL's other way: from 4714 BC to 294276."""
    day_s = 86_400
    array = pa.array([-210_866_803_200 * 10**6, INT64 - 1], pa.int64()).cast(pa.timestamp("us"))
    expected = ["4714-11-24 00:00:00 BC", "294247-01-10 04:00:54.775807"]
    found = copied(session, ["timestamp"], pa.RecordBatch.from_arrays([array], ["x"]), read="x::text")
    assert [row[0] for row in found] == expected
    days = pa.array([-210_866_803_200 // day_s, 2_145_042_905], pa.int32()).cast(pa.date32())
    found = copied(session, ["date"], pa.RecordBatch.from_arrays([days], ["x"]), read="x::text")
    assert [row[0] for row in found] == ["4714-11-24 BC", "5874897-12-31"]


@pytest.mark.parametrize("beyond", [-INT64, -INT64 + 1, -INT64 + 946_684_800_000_000])
def test_a_moment_before_all_time_does_not_come_round_as_one_in_the_future(beyond: int) -> None:
    array = pa.array([beyond], pa.int64()).cast(pa.timestamp("us"))
    with pytest.raises(Unfit, match="column x: a date or time is earlier than PostgreSQL knows"):
        encode_rows(pa.RecordBatch.from_arrays([array], ["x"]), [postgres_copy.timestamps(None)])
    days = pa.array([-(2**31), -(2**31) + 10_957], pa.int32()).cast(pa.date32())
    with pytest.raises(Unfit, match="earlier than PostgreSQL knows"):
        encode_rows(pa.RecordBatch.from_arrays([days], ["x"]), [postgres_copy.dates()])


@pytest.mark.parametrize(
    ("kind", "arrow", "number"),
    [
        ("timestamp", pa.timestamp("us"), 10**15 - INT64),
        ("date", pa.date32(), 2**31 - 1),
    ],
)
def test_what_is_out_of_range_is_refused_by_the_server(
    session: psycopg.Connection[Any], kind: str, arrow: Any, number: int
) -> None:
    array = pa.array([number], pa.int32() if kind == "date" else pa.int64()).cast(arrow)
    with pytest.raises(psycopg.errors.DatetimeFieldOverflow, match="out of range"):
        copied(session, [kind], pa.RecordBatch.from_arrays([array], ["x"]))


def test_a_large_batch_is_encoded_in_parts(session: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_copy, "BYTES_MAX", 1000)
    batch = pa.RecordBatch.from_pylist([{"id": n, "text": "x" * n} for n in range(300)])
    assert len(encode_rows(batch, [postgres_copy.numbers(pa.int64(), ">i8"), postgres_copy.text])) > 20
    assert copied(session, ["int8", "text"], batch) == [(n, "x" * n) for n in range(300)]


# Random rows ----------------------------------------------------------------------------------------------------------


def _text(**limits: Any) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8", exclude_characters="\0"), **limits)


def _list(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.none() | of, max_size=4)


KINDS: list[tuple[str, Any, st.SearchStrategy[Any]]] = [
    ("int2", pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    ("int4", pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    ("int8", pa.int64(), st.integers(-INT64, INT64 - 1)),
    ("numeric", pa.int64(), st.integers(-INT64, INT64 - 1).map(Decimal)),
    ("float8", pa.float64(), st.floats(allow_nan=False)),
    ("float4", pa.float32(), st.floats(allow_nan=False, width=32)),
    ("bool", pa.bool_(), st.booleans()),
    ("text", pa.string(), _text(max_size=20)),
    ("bytea", pa.binary(), st.binary(max_size=20)),
    ("date", pa.date32(), st.dates()),
    ("timestamp", pa.timestamp("us"), st.datetimes()),
    ("timestamptz", pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    ("numeric(18,2)", pa.decimal128(18, 2), st.decimals(-(10**15), 10**15, places=2)),
    (
        "numeric(38,7)",
        pa.decimal128(38, 7),
        st.integers(1 - 10**38, 10**38 - 1).map(lambda n: Decimal(n).scaleb(-7, EXACT)),
    ),
    ("uuid", pa.string(), st.uuids()),
    ("text[]", pa.list_(pa.string()), _list(_text(max_size=5))),
    ("int4[]", pa.list_(pa.int32()), _list(st.integers(-(2**31), 2**31 - 1))),
    ("bool[]", pa.list_(pa.bool_()), _list(st.booleans())),
]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_random_rows_come_back_equal(session: psycopg.Connection[Any], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    expected = data.draw(st.lists(st.tuples(*(st.none() | values for _, _, values in kinds)), min_size=1, max_size=12))
    before, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    padded = [expected[0]] * before + expected + [expected[-1]] * behind
    arrays = []
    for place, (kind, arrow, _) in enumerate(kinds):
        values = [row[place] for row in padded]
        arrays.append(pa.array([v if v is None else str(v) for v in values] if kind == "uuid" else values, arrow))
    batch = pa.RecordBatch.from_arrays(arrays, [f"c{n}" for n in range(len(kinds))]).slice(before, len(expected))
    cut = data.draw(st.integers(0, len(expected)))
    parts = [part for part in (batch.slice(0, cut), batch.slice(cut)) if part.num_rows]
    assert copied(session, [kind for kind, _, _ in kinds], *parts) == expected


# What does not fit ----------------------------------------------------------------------------------------------------

REFUSED = [
    ("timestamptz", pa.timestamp("us")),
    ("timestamp", pa.timestamp("us", "UTC")),
    ("float4", pa.float64()),
    ("float8", pa.decimal128(5, 2)),
    ("numeric", pa.float64()),
    ("numeric(10,2)", pa.decimal128(12, 4)),
    ("numeric(10,2)[]", pa.list_(pa.decimal128(12, 4))),
    ("numeric", pa.decimal128(5, -2)),
    ("text", pa.int64()),
    ("text", pa.binary()),
    ("text", pa.null()),
    ("bytea", pa.string()),
    ("int4", pa.string()),
    ("int4", pa.bool_()),
    ("interval", pa.duration("us")),
    ("time", pa.time64("us")),
    ("date", pa.timestamp("us")),
    ("inet", pa.string()),
    ("jsonb", pa.map_(pa.string(), pa.int64())),
    ("jsonb", pa.struct([("a", pa.int64())])),
    ("int8[]", pa.list_(pa.list_(pa.int64()))),
    ("int8", pa.list_(pa.int64())),
    ("int8[]", pa.int64()),
    ("positive[]", pa.list_(pa.int32())),
]


@pytest.mark.parametrize(("kind", "arrow"), REFUSED, ids=[f"{a}-{k}" for k, a in REFUSED])
def test_a_type_that_does_not_fit_has_no_encoder(session: psycopg.Connection[Any], kind: str, arrow: Any) -> None:
    session.execute("DROP TABLE IF EXISTS t")
    session.execute(f"CREATE TABLE t (x {kind})")
    (only,) = columns_of(session, "t")
    assert encoder(arrow, only) is None


def test_a_number_that_is_too_large_is_named_with_its_column() -> None:
    batch = pa.RecordBatch.from_pylist([{"fine": 1, "large": 2**31}])
    encoders = [postgres_copy.numbers(pa.int32(), ">i4")] * 2
    with pytest.raises(Unfit, match="column large: Integer value 2147483648 not in range"):
        encode_rows(batch, encoders)


def test_a_timestamp_is_not_cut_short() -> None:
    array = pa.array([1], pa.int64()).cast(pa.timestamp("ns"))
    with pytest.raises(Unfit, match="would lose data"):
        encode_rows(pa.RecordBatch.from_arrays([array], ["x"]), [postgres_copy.timestamps(None)])


def test_a_week_is_a_week(session: psycopg.Connection[Any]) -> None:
    """Days and microseconds are counted alike on both sides of the year 2000."""
    days = [date(1999, 12, 28) + timedelta(days=n) for n in range(8)]
    moments = [datetime(1999, 12, 31, 23, 59, 59, 999_990) + timedelta(microseconds=n) for n in range(20)]
    assert one(session, "date", pa.date32(), days) == days
    assert one(session, "timestamp", pa.timestamp("us"), moments) == moments
