"""Many rows in one prepared statement, as MariaDB takes them: what is agreed on, what is sent, what becomes of it."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.dev.mariadb import MariaDbServer, mariadb
from semel.errors import BatchFailed, ConfigError, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.mysql import MySql
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql import xa as mysql_xa
from semel.sinks.mysql.connection import execute, runner
from semel.sinks.mysql.loaders import bulk as mysql_bulk
from semel.sinks.mysql.loaders.base import Field, Loader
from semel.sinks.mysql.loaders.bulk import Bulk, binary, encode
from semel.sinks.mysql.loaders.packed import Packer
from semel.sinks.mysql.loaders.text import Inserts, LoadData
from semel.sinks.mysql.store import columns_of
from semel.sinks.mysql.types import DAYS, Column, Unfit, encoder
from semel.sinks.mysql.writer import MySqlWriter
from semel.testing.harness import attempt
from tests.sinks.certificates import Certificate, certificate
from tests.sinks.mysql_rig import MODES, Database, commit, db, own_server, write
from tests.sinks.participants import column, prepare, rows, started

__all__ = ["certificate", "db", "own_server"]

STATEMENTS_MAX = 40
SETTINGS = {"max_allowed_packet": "64M", "max_prepared_stmt_count": f"{STATEMENTS_MAX}", "local_infile": "OFF"}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[Database]:
    """A server that speaks TLS, takes large packets and few prepared statements."""
    folder = tmp_path_factory.mktemp("mariadb_secure")
    settings = {**SETTINGS, "ssl_key": str(certificate.key), "ssl_cert": str(certificate.path)}
    with mariadb(folder / "data", settings=settings, say=print) as server:
        yield Database(server.url)


def loader_of(sink: MySql, batch: pa.RecordBatch) -> Loader:
    """The way that a task of the sink chooses."""
    writer = MySqlWriter(sink, Branch(attempt(), sink.name, 0, 0), durable=True)
    try:
        writer.write(batch)
        assert writer._loader is not None
        return writer._loader
    finally:
        writer.abort()


# What is agreed on --------------------------------------------------------------------------------------------------


def greeting(flags: int, extended: int) -> bytes:
    """As a server sends it: https://mariadb.com/kb/en/connection/."""
    start = b"\x0a5.5.5-10.11.6-MariaDB\0" + struct.pack("<I", 7) + b"abcdefgh\0"
    middle = struct.pack("<HBHHB", flags & 0xFFFF, 45, 2, flags >> 16, 21) + bytes(6) + struct.pack("<I", extended)
    return start + middle + b"ijklmnopqrst\0mysql_native_password\0"


def test_only_a_server_that_is_not_mysql_offers_extensions() -> None:
    flags = 0x81FFF7FE
    assert mysql_wire.offered(greeting(flags, 0x1D)) == 0x1D
    assert mysql_wire.offered(greeting(flags | mysql_wire.CLIENT_MYSQL, 0x1D)) == 0
    assert mysql_wire.offered(greeting(flags, 0x1D)[:40]) == 0


def test_the_answer_asks_for_extensions_in_its_last_reserved_bytes() -> None:
    head = struct.pack("<iIB23s", 0x3FA68F, 2**24 - 1, 45, b"")
    assert len(head) == 32
    expected = struct.pack("<iIB19sI", 0x3FA68E, 2**24 - 1, 45, b"", 4)
    assert mysql_wire.answered(head, 4) == expected
    assert mysql_wire.answered(head + b"user\0secret", 4) == expected + b"user\0secret"


def test_a_connection_has_the_extension_with_and_without_tls(db: Database, secure: Database) -> None:
    for database, uses_tls in ((db, False), (secure, True)):
        with database.sink().place.connect() as connection:
            ((_, cipher),) = execute(connection, "SHOW SESSION STATUS LIKE 'Ssl_cipher'")
            assert bool(cipher) == uses_tls
            assert connection.extensions == mysql_wire.STMT_BULK_OPERATIONS


def test_the_authority_that_a_url_names_is_asked_for(secure: Database, certificate: Certificate) -> None:
    """The certificate is its own authority, and made out to localhost."""
    right, wrong = f"?ssl_ca={certificate.path}", f"?ssl_ca={certificate.another}"
    at_localhost = secure.url.replace("127.0.0.1", "localhost")
    secure.sink(url=secure.url + right).check(rows().schema)
    secure.sink(url=f"{at_localhost}{right}&ssl_verify_identity=true").check(rows().schema)
    secure.sink(url=f"{secure.url}{wrong}&ssl_verify_cert=false").check(rows().schema)
    for refused in (secure.url + wrong, f"{secure.url}{right}&ssl_verify_identity=true"):
        with pytest.raises(ConfigError, match=r"MySQL refused the login: .*certificate verify failed"):
            secure.sink(url=refused).check(rows().schema)


def test_a_server_without_tls_is_refused_where_the_url_asks_for_it(db: Database, certificate: Certificate) -> None:
    with pytest.raises(ConfigError, match=r"MySQL refused the login: .*SSL"):
        db.sink(url=f"{db.url}?ssl_ca={certificate.path}").check(rows().schema)


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_rows_arrive_over_tls(secure: Database, mode: str) -> None:
    table = f"{secure.table}_{mode}"
    sink = secure.sink(mode, table=table, name=f"tls_{mode}")
    write(sink, rows((1, "a"), (2, None)))
    assert secure.run(f"SELECT * FROM {table} ORDER BY id") == [(1, "a"), (2, None)]  # noqa: S608 - ours


@pytest.mark.parametrize("mode", MODES)
def test_the_way_of_least_cost_is_chosen(
    db: Database, own_server: MariaDbServer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(loader_of(db.sink(mode), rows((1, "a")))) is (Bulk if mode == "xa" else Packer)
    monkeypatch.setattr(mysql_wire, "WANTED", 0)
    assert isinstance(loader_of(db.sink(mode), rows((1, "a"))), LoadData)
    assert isinstance(loader_of(Database(own_server.url).sink(mode), rows((1, "a"))), Inserts)


def test_a_server_that_has_no_room_for_a_statement_takes_the_rows_another_way(secure: Database) -> None:
    sink = secure.sink(table=f"{secure.table}_full", name="full")
    write(sink, rows((1, "a")))
    with secure.session() as cursor:
        for number in range(STATEMENTS_MAX):
            cursor.execute(f"PREPARE s{number} FROM 'DO 1'")
        assert isinstance(loader_of(sink, rows((2, "b"))), Inserts)


# What is sent -------------------------------------------------------------------------------------------------------

MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 123456)


def counted(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def as_date(value: dt.date) -> bytes:
    return struct.pack("<HBB", value.year, value.month, value.day)


def as_moment(value: dt.datetime) -> bytes:
    return as_date(value) + struct.pack("<BBBI", value.hour, value.minute, value.second, value.microsecond)


#: type of the rows, column, values, how the protocol has one of them.
FORMS: list[tuple[pa.DataType, Column, list[Any], Callable[[Any], bytes]]] = [
    (pa.int8(), Column("x", "tinyint", "tinyint"), [-128, 127], lambda v: struct.pack("<b", v)),
    (pa.int16(), Column("x", "smallint", "smallint"), [-(2**15), 3], lambda v: struct.pack("<h", v)),
    (pa.int32(), Column("x", "int", "int"), [-(2**31), 3], lambda v: struct.pack("<i", v)),
    (pa.int64(), Column("x", "bigint", "bigint"), [-(2**63), 3], lambda v: struct.pack("<q", v)),
    (pa.uint64(), Column("x", "bigint", "bigint unsigned"), [2**64 - 1, 0], lambda v: struct.pack("<Q", v)),
    (pa.float32(), Column("x", "float", "float"), [0.5, -0.0], lambda v: struct.pack("<d", v)),
    (pa.float64(), Column("x", "double", "double"), [1 / 3, 5e-310], lambda v: struct.pack("<d", v)),
    (pa.bool_(), Column("x", "tinyint", "tinyint(1)"), [True, False], lambda v: bytes([v])),
    (pa.string(), Column("x", "text", "text"), ["", "ž🐎\0\t\\"], lambda v: counted(v.encode())),
    (pa.large_binary(), Column("x", "blob", "blob"), [b"", b"\xff\0"], counted),
    (
        pa.decimal128(6, 2),
        Column("x", "decimal", "decimal(6,2)", precision=6, scale=2),
        [Decimal("-1234.56"), Decimal("0.01")],
        lambda v: counted(str(v).encode()),
    ),
    (
        pa.date32(),
        Column("x", "date", "date"),
        [dt.date(1000, 1, 1), dt.date(2024, 2, 29), dt.date(1969, 12, 31), dt.date(9999, 12, 31)],
        lambda v: counted(as_date(v)),
    ),
    (
        pa.timestamp("us"),
        Column("x", "datetime", "datetime(6)", fraction=6),
        [MOMENT, dt.datetime(1000, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(9999, 12, 31)],
        lambda v: counted(as_moment(v)),
    ),
]


def field_of(arrow: pa.DataType, column: Column) -> Field:
    made = encoder(arrow, column)
    assert made is not None
    return Field(column.name, made, column)


def encoded(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[bytes]:
    ways = [binary(array.type, field.column) for array, field in zip(batch.columns, fields, strict=True)]
    found: list[bytes] = encode(batch, fields, ways).to_pylist()
    return found


def turned(values: Sequence[Any], shift: int) -> list[Any]:
    """Sixty of them, so that each comes to stand beside each of other columns."""
    return [values[(n + n // 7 + shift) % len(values)] for n in range(60)]


@pytest.mark.parametrize("slices", [False, True])
def test_every_row_is_laid_out_as_the_protocol_says(slices: bool) -> None:
    """All types side by side, nulls in every place, and a batch that begins in the middle of Arrow's memory."""
    fields = [field_of(arrow, column) for arrow, column, _, _ in FORMS]
    given = [turned([*values, None], shift) for shift, (_, _, values, _) in enumerate(FORMS)]
    arrays = [pa.array(values, arrow) for values, (arrow, _, _, _) in zip(given, FORMS, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, [f"x{n}" for n in range(len(arrays))])
    expected = [
        b"".join(
            b"\1" if value is None else b"\0" + form(value) for value, (_, _, _, form) in zip(row, FORMS, strict=True)
        )
        for row in zip(*given, strict=True)
    ]
    if slices:
        batch, expected = batch.slice(13, 31), expected[13:44]
    assert encoded(batch, fields) == expected


@pytest.mark.parametrize(
    ("letters", "size_of_long", "size_of_one"),
    [
        (250, b"\xfa", b"\1"),
        (251, b"\xfc\xfb\0", b"\xfc\1\0"),
        (70_000, b"\xfe\x70\x11\1\0\0\0\0\0", b"\xfe\1\0\0\0\0\0\0\0"),
    ],
)
def test_the_longest_text_decides_how_sizes_are_written(letters: int, size_of_long: bytes, size_of_one: bytes) -> None:
    batch = column(["a" * letters, None, "b"], pa.string())
    found = encoded(batch, [field_of(pa.string(), Column("x", "text", "text"))])
    assert found == [b"\0" + size_of_long + b"a" * letters, b"\1", b"\0" + size_of_one + b"b"]


def test_a_column_may_be_all_nulls() -> None:
    for arrow, only, _, _ in FORMS:
        assert encoded(column([None, None], arrow), [field_of(arrow, only)]) == [b"\1", b"\1"]


def test_every_day_that_a_column_can_hold_is_written_as_it_is() -> None:
    days = pa.array(range(DAYS[0], DAYS[1] + 1), pa.int32()).cast(pa.date32())
    found = encoded(pa.RecordBatch.from_arrays([days], ["x"]), [field_of(pa.date32(), Column("x", "date", "date"))])
    given = days.cast(pa.string()).to_pylist()
    assert len(found) == 3_287_182
    assert ["{:04}-{:02}-{:02}".format(*struct.unpack("<xxHBB", row)) for row in found] == given


def test_what_stands_in_the_place_of_a_null_does_not_matter() -> None:
    """Arrow keeps whatever was there before; it may be what no column could hold."""
    valid = pa.py_buffer(b"\x01")
    numbers = pa.py_buffer(struct.pack("<dd", 1.0, float("nan")))
    moments = pa.py_buffer(struct.pack("<qq", 1_000_000, -(2**63)))
    arrays = [
        pa.Array.from_buffers(pa.float64(), 2, [valid, numbers]),
        pa.Array.from_buffers(pa.timestamp("us"), 2, [valid, moments]),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, ["x", "y"])
    fields = [
        field_of(pa.float64(), Column("x", "double", "double")),
        field_of(pa.timestamp("us"), Column("y", "datetime", "datetime", fraction=0)),
    ]
    first = struct.pack("<xd", 1.0) + b"\0" + counted(as_moment(dt.datetime(1970, 1, 1, 0, 0, 1)))
    assert encoded(batch, fields) == [first, b"\1\1"]


# What becomes of it ---------------------------------------------------------------------------------------------------


def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each request."""
    sizes: list[int] = []
    plain = mysql_wire.Statement.execute_bulk

    def noted(statement: mysql_wire.Statement, pieces: Sequence[Any]) -> None:
        sizes.append(sum(map(len, pieces)))
        plain(statement, pieces)

    monkeypatch.setattr(mysql_wire.Statement, "execute_bulk", noted)
    return sizes


def test_many_rows_go_in_several_requests(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 10_000)
    sizes = requests(monkeypatch)
    tasks = [rows(*((n, f"row {n}") for n in range(20_000))), rows(*((n, "x") for n in range(100)))]
    write(db.sink("xa"), tasks)
    assert db.rows("count(*), sum(id), count(DISTINCT text)", "1") == [(20_100, 199_990_000 + 4_950, 20_001)]
    # A row is a number, two bytes that say that nothing is null, and a text with its size.
    assert len(sizes) == 1 + -(-sum(9 + 2 + len(f"row {n}") for n in range(20_000)) // 10_000)
    assert max(sizes) < 10_100


def test_small_batches_share_a_request(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = requests(monkeypatch)
    sink = db.sink("xa")
    with started(sink) as participant:
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        for n in range(10):
            writer.write(rows((n, "a")))
        promise = participant.prepare(attempt(), [writer.prepare()])
        assert commit(participant, promise) is Outcome.COMMITTED
    assert (len(sizes), db.rows("count(*)", "1")) == (1, [(10,)])


def test_batches_of_other_types_do_not_share_a_request(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types stand before the rows, once."""
    sizes = requests(monkeypatch)
    db.create("x bigint")
    place = db.sink().place
    with place.connect() as connection:
        (only,) = columns_of(runner(connection, place), place, db.table)
        loader = Bulk(Inserts(connection, db.table, [field_of(pa.int64(), only)], 2**20))
        for kind in (pa.int64(), pa.int32(), pa.int32(), pa.uint32()):
            loader.add(column([-1 if kind != pa.uint32() else 2**32 - 1], kind))
        loader.flush()
    assert len(sizes) == 3
    assert db.rows(order="x") == [(-1,), (-1,), (-1,), (2**32 - 1,)]


def test_a_row_that_no_packet_can_carry_goes_by_load_data_and_in_its_place(db: Database) -> None:
    db.create("n bigint unsigned AUTO_INCREMENT PRIMARY KEY, id bigint, text longtext")
    large = "ž" * 10_000_000
    write(db.sink("xa"), rows((1, "a"), (2, large), (3, "b"), (4, large + "c"), (5, "d")))
    found = db.rows("id, char_length(text)", "n")
    assert found == [(1, 1), (2, 10_000_000), (3, 1), (4, 10_000_001), (5, 1)]


def test_a_request_may_be_larger_than_a_packet_of_the_protocol(
    secure: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends at 16 MiB: then another one follows, of no bytes if need be."""
    # A server with little time needs long to free buffers of this size.
    monkeypatch.setattr(mysql_xa, "LET_GO_S", 0.5)
    sizes = requests(monkeypatch)
    sink = secure.sink("xa", table=f"{secure.table}_large", name="large")
    beside = 4 + 2 + 2 * 2 + 9 + 1 + 9 + 1  # statement, flags, types, id, null or not, size; the command itself
    exact = 2**24 - 1 - beside
    write(sink, rows((1, "a" * 40_000_000), (2, "b" * exact), (3, "c" * (exact + 1))))
    assert sizes == [40_000_000 + beside - 1, 2**24 - 2, 2**24 - 1]
    found = secure.run(f"SELECT id, length(text), left(text, 1), right(text, 1) FROM {sink.table} ORDER BY id")  # noqa: S608
    assert found == [(1, 40_000_000, "a", "a"), (2, exact, "b", "b"), (3, exact + 1, "c", "c")]


def test_a_statement_is_closed_when_the_rows_are_sent(secure: Database) -> None:
    table = f"{secure.table}_closed"
    secure.run(f"CREATE TABLE {table} (x bigint)")
    place = secure.sink().place
    with place.connect() as connection:
        columns = columns_of(runner(connection, place), place, table)
        other = Inserts(connection, table, [field_of(pa.int64(), columns[0])], 2**20)
        statements = "SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'"
        loader = Bulk(other)
        assert execute(connection, statements)[0][1] == "1"
        loader.add(column([1, None], pa.int64()))
        loader.flush()
        assert execute(connection, statements)[0][1] == "0"
        assert execute(connection, f"SELECT count(*), count(x) FROM {table}") == [(2, 1)]  # noqa: S608 - ours


def test_a_row_that_is_changed_in_the_middle_fails_them_all(db: Database) -> None:
    """Spaces at the end are cut off with no more than a note."""
    db.create("x varchar(3)")
    values = ["abc"] * 5_000 + ["abc "] + ["abc"] * 5_000
    with started(db.sink("xa")) as participant:
        with pytest.raises(BatchFailed, match=r"rows were changed: Data truncated for column 'x' at row 5001"):
            prepare(participant, db.sink("xa"), attempt(), column(values, pa.string()))
        participant.abort(participant.recover().branches)
    assert (db.rows(order="1"), db.staged()) == ([], [])


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_triggers_and_computed_columns_see_every_row(db: Database, mode: str) -> None:
    seen = f"seen{db.suffix}"
    db.create("id bigint, text varchar(20), twice bigint AS (id * 2) STORED, made int NOT NULL DEFAULT 7")
    db.run(f"CREATE TABLE {seen} (id bigint, text varchar(20))")
    body = f"INSERT INTO {seen} VALUES (NEW.id, NEW.text)"  # noqa: S608 - ours
    db.run(f"CREATE TRIGGER first{db.suffix} BEFORE INSERT ON {db.table} FOR EACH ROW SET NEW.text = upper(NEW.text)")
    db.run(f"CREATE TRIGGER after{db.suffix} AFTER INSERT ON {db.table} FOR EACH ROW {body}")
    write(db.sink(mode), rows(*((n, f"row {n}" if n % 3 else None) for n in range(1_000))))
    found = db.rows(order="id")
    assert found == [(n, f"ROW {n}" if n % 3 else None, 2 * n, 7) for n in range(1_000)]
    assert db.run(f"SELECT * FROM {seen} ORDER BY id") == [row[:2] for row in found]  # noqa: S608 - ours


def test_the_number_of_rows_is_compared(db: Database) -> None:
    db.create("x bigint")
    with db.sink().place.connect() as connection:
        place = db.sink().place
        (only,) = columns_of(runner(connection, place), place, db.table)
        loader = Bulk(Inserts(connection, db.table, [field_of(pa.int64(), only)], 2**20))
        loader.add(column([1, 2, 3], pa.int64()))
        loader._rows += 1
        with pytest.raises(Unfit, match="1 of 4 rows were left out"):
            loader.flush()


def test_a_lock_that_somebody_holds_is_waited_for_and_then_the_batch_is_tried_again(db: Database) -> None:
    db.create("id bigint PRIMARY KEY, text varchar(20)")
    sink = db.sink("xa", timeout_s=1)
    with db.session() as cursor, started(sink) as participant:
        cursor.execute("BEGIN")
        cursor.execute(f"INSERT INTO {db.table} VALUES (7, 'mine')")  # noqa: S608 - ours
        with pytest.raises(SinkUnavailable, match="Lock wait timeout exceeded"):
            prepare(participant, sink, attempt(), rows((6, "a"), (7, "b")))
        cursor.execute("ROLLBACK")
        promise = prepare(participant, sink, attempt(0, 1), rows((6, "a"), (7, "b")))
        assert commit(participant, promise) is Outcome.COMMITTED
    assert db.rows() == [(6, "a"), (7, "b")]
