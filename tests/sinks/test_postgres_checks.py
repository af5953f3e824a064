"""What a PostgreSQL sink says before the first row, to whom it may speak, and what it never says."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from semel.dev.postgres import PostgresServer, postgres
from semel.errors import BatchFailed, ConfigError, Refused, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.runtime.arrow import ArrowLimit
from semel.runtime.hands import AS_PLANNED
from semel.runtime.staging import Staging
from semel.sinks.postgres import Postgres
from semel.testing.harness import attempt, context
from tests.sinks.participants import prepare, rows, started
from tests.sinks.postgres_rig import MODES, Database, commit, db, eventually, quoted, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["db"]
TWO = rows().schema


def lines(error: Any) -> list[str]:
    return str(error.value).splitlines()


# The table --------------------------------------------------------------------------------------------------------


def test_a_missing_table_is_named_with_its_place_and_nothing_is_made(db: Database) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        db.sink().check(TWO)
    where = db.url.partition("@")[2].partition("/")[0]
    assert lines(caught) == [
        f"PostgreSQL table {db.schema}.orders in semel at {where} does not exist.",
        "  the data now: nothing was started and no row was written",
        "  what to do: Create it, or let semel do so with create=True.",
    ]
    db.sink(create=True).check(TWO)
    assert db.run("SELECT count(*) FROM pg_class WHERE relnamespace = %s::regnamespace", db.schema) == [(0,)]


def test_a_table_is_created_with_types_that_fit(db: Database) -> None:
    kinds = {
        pa.int8(): "smallint",
        pa.int16(): "smallint",
        pa.int32(): "integer",
        pa.int64(): "bigint",
        pa.float32(): "real",
        pa.float64(): "double precision",
        pa.decimal128(38, 18): "numeric(38,18)",
        pa.bool_(): "boolean",
        pa.string(): "text",
        pa.binary(): "bytea",
        pa.date32(): "date",
        pa.timestamp("us"): "timestamp without time zone",
        pa.timestamp("us", "UTC"): "timestamp with time zone",
    }
    of_many = {pa.list_(arrow): f"{name}[]" for arrow, name in kinds.items()}
    columns = [(f"c{n}", arrow) for n, arrow in enumerate([*kinds, *of_many])]
    schema = pa.schema([("id", pa.string()), *columns])
    row = pa.RecordBatch.from_pylist([{**dict.fromkeys(schema.names), "id": "a"}], schema)
    write(db.keyed("upsert"), row)
    found = db.run(
        "SELECT format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
        "WHERE attrelid = 'orders'::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert found == [("text", True), *((name, False) for name in [*kinds.values(), *of_many.values()])]


def test_a_missing_schema_is_named(db: Database) -> None:
    with pytest.raises(ConfigError, match="there is no schema Nowhere"):
        db.sink(schema="Nowhere", create=True).check(TWO)


def test_a_table_that_a_crash_empties_is_refused(db: Database) -> None:
    """The ledger outlives the crash: the rows would be gone, and nobody would write them again."""
    db.run("CREATE UNLOGGED TABLE orders (id bigint, text text)")
    with pytest.raises(Refused) as caught:
        db.sink().check(TWO)
    what, _, remedy = lines(caught)
    assert what.endswith(
        "orders is UNLOGGED: a crash of the server empties it, and the ledger would still say that its rows are there."
    )
    db.run(f"SET search_path TO {quoted(db.schema)}; {remedy.partition('what to do: ')[2].partition(',')[0]}")
    db.sink().check(TWO)


def test_so_is_one_with_such_a_partition(db: Database) -> None:
    db.run("CREATE TABLE orders (id bigint, text text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE low PARTITION OF orders FOR VALUES FROM (0) TO (10)")
    db.sink().check(TWO)
    db.run("CREATE UNLOGGED TABLE high PARTITION OF orders FOR VALUES FROM (10) TO (20)")
    with pytest.raises(Refused, match="high is UNLOGGED"):
        db.sink().check(TWO)


def test_a_table_of_another_server_is_refused(db: Database) -> None:
    """Its server commits for itself, before the ledger here does."""
    wrapper = db.schema
    db.run(f"CREATE FOREIGN DATA WRAPPER {wrapper}")
    try:
        db.run(f"CREATE SERVER {wrapper} FOREIGN DATA WRAPPER {wrapper}")
        db.run(f"CREATE FOREIGN TABLE orders (id bigint, text text) SERVER {wrapper}")
        with pytest.raises(Refused, match="orders is a foreign table, whose server commits for itself"):
            db.sink().check(TWO)
    finally:
        db.run(f"DROP FOREIGN DATA WRAPPER {wrapper} CASCADE")


def test_a_server_that_does_not_sync_is_warned_of(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "semel")
    db.run("CREATE TABLE orders (id bigint, text text)")
    db.sink().check(TWO)
    assert caplog.messages == []
    db.run("ALTER SYSTEM SET fsync = off")
    try:
        assert db.run("SELECT pg_reload_conf()") == [(True,)]
        assert eventually(lambda: db.run("SHOW fsync") == [("off",)])
        db.sink().check(TWO)
        (said,) = caplog.messages
        assert said.endswith(": fsync is off: a power cut may take back what the server has committed. Turn it on.")
    finally:
        db.run("ALTER SYSTEM RESET fsync")
        db.run("SELECT pg_reload_conf()")
        assert eventually(lambda: db.run("SHOW fsync") == [("on",)])


def test_everything_that_does_not_match_is_said_at_once(db: Database) -> None:
    db.run(
        "CREATE TABLE orders (id int4 GENERATED ALWAYS AS IDENTITY, text timestamptz, price numeric(10,2), "
        "tags int4[], needed text NOT NULL, fine text NOT NULL DEFAULT '')"
    )
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.timestamp("us")),
            ("price", pa.decimal128(12, 4)),
            ("tags", pa.list_(pa.string())),
            ("other", pa.string()),
        ]
    )
    with pytest.raises(SchemaMismatch) as caught:
        db.sink().check(schema)
    assert lines(caught)[0].partition(" does not match the rows: ")[2] == (
        "no column other; column id is computed by the server; "
        "column text is timestamp with time zone, the rows have timestamp[us]; "
        "column price is numeric(10,2), the rows have decimal128(12, 4); "
        "column tags is integer[], the rows have list<item: string>; "
        "column needed is required and the rows do not have it."
    )


def test_a_required_value_of_a_domain(db: Database) -> None:
    db.run("CREATE DOMAIN needed AS text NOT NULL")
    db.run("CREATE DOMAIN given AS text NOT NULL DEFAULT 'x'")
    db.run("CREATE TABLE orders (id int8, text text, a needed, b given, c needed DEFAULT 'y')")
    with pytest.raises(SchemaMismatch, match=r"the rows: column a is required and the rows do not have it\.\n"):
        db.sink().check(TWO)


@pytest.mark.parametrize(
    "arrow",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.struct([("a", pa.int64())]),
        pa.duration("us"),
        pa.list_(pa.list_(pa.int64())),
        pa.null(),
    ],
)
def test_types_that_postgresql_has_not_are_named_before_a_table_is_made(db: Database, arrow: Any) -> None:
    with pytest.raises(SchemaMismatch, match=r"cannot hold these columns: text \("):
        db.sink(create=True).check(pa.schema([("id", pa.int64()), ("text", arrow)]))


INDEXES = {
    "none": "SELECT 1",
    "not unique": "CREATE INDEX ON orders (id)",
    "partial": "CREATE UNIQUE INDEX ON orders (id) WHERE id > 0",
    "of an expression": "CREATE UNIQUE INDEX ON orders ((id + 1))",
    "of more columns": "CREATE UNIQUE INDEX ON orders (id, text)",
    "deferrable": "ALTER TABLE orders ADD UNIQUE (id) DEFERRABLE",
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("mode", ["upsert", "versions"])
def test_the_unique_index_must_be_one_that_can_be_used(db: Database, mode: str, index: str) -> None:
    db.run("CREATE TABLE orders (id int8, text text, semel_version bigint)")
    db.run(INDEXES[index])
    of = "id" if mode == "upsert" else "id, semel_version"
    with pytest.raises(SchemaMismatch, match=rf"no unique index on \({of}\), which mode '{mode}' needs"):
        db.keyed(mode).check(TWO)


def test_a_key_that_cannot_be_compared_is_refused_before_the_first_row(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text json)")
    with pytest.raises(ConfigError, match="type json has no default operator class"):
        db.keyed("dedup", key="text", create=False).check(TWO)


def test_versions_need_their_column(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text text)")
    with pytest.raises(SchemaMismatch, match="no column semel_version, which mode 'versions' needs"):
        db.keyed("versions").check(TWO)


# Who may write ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clerk(db: Database) -> Iterator[str]:
    """A user who may log in and use the schema, and no more."""
    name = f"clerk_{db.schema}"
    db.run(f"CREATE ROLE {name} LOGIN PASSWORD 'open sesame'")
    db.run(f"GRANT USAGE ON SCHEMA {quoted(db.schema)} TO {name}")
    yield f"postgresql://{name}:open%20sesame@{db.url.partition('@')[2]}"
    db.run(f"DROP OWNED BY {name}; DROP ROLE {name}")


#: What docs/sinks/postgres.md says that a user needs on the table, beside CREATE on the schema.
GRANTS = {
    "ledger": ["INSERT"],
    "prepared": ["INSERT"],
    "upsert": ["INSERT", "SELECT", "UPDATE"],
    "dedup": ["INSERT"],
    "versions": ["INSERT", "SELECT", "UPDATE", "DELETE"],
}


@pytest.mark.parametrize("mode", MODES)
def test_each_grant_is_needed_and_together_they_suffice(db: Database, clerk: str, mode: str) -> None:
    role = f"clerk_{db.schema}"
    db.run("CREATE TABLE orders (id int8, text text, semel_version bigint DEFAULT 0)")
    db.run(
        "CREATE UNIQUE INDEX ON orders (id)"
        if mode == "upsert"
        else "CREATE UNIQUE INDEX ON orders (id, semel_version)"
    )
    sink = db.keyed(mode, url=clerk, create=False, versions_kept=1 if mode == "versions" else 0)
    on = {"CREATE": f"SCHEMA {quoted(db.schema)}"} | dict.fromkeys(GRANTS[mode], f"{quoted(db.schema)}.orders")
    for missing in on:
        for grant, what in on.items():
            verb, word = ("REVOKE", "FROM") if grant == missing else ("GRANT", "TO")
            db.run(f"{verb} {grant} ON {what} {word} {role}")
        with pytest.raises(ConfigError, match=r"permission denied for|may not INSERT") as caught:
            sink.check(TWO)
        assert len(lines(caught)) == 3
        assert "GRANT" in lines(caught)[2]
    db.run(f"GRANT {missing} ON {on[missing]} TO {role}")
    write(sink, rows((1, "a")), rows((2, "b")))
    assert db.run("SELECT id FROM orders ORDER BY 1") == [(1,), (2,)]


def test_a_fence_that_may_not_be_written_is_a_matter_of_configuration(db: Database, clerk: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"did not let us fence: permission denied for schema"),
        started(db.sink(url=clerk)),
    ):
        pass


def test_a_read_only_database(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text text)")
    url = f"{db.url}?options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(ConfigError, match="cannot execute CREATE TABLE in a read-only transaction"):
        db.sink(url=url).check(TWO)


# Where the server is ----------------------------------------------------------------------------------------------


def test_wrong_logins_are_matters_of_configuration_and_say_why(db: Database) -> None:
    host = db.url.partition("@")[2].partition("/")[0]
    wrong = {
        f"postgresql://semel:tree@{host}/semel": 'password authentication failed for user "semel"',
        f"postgresql://nobody:tree@{host}/semel": 'password authentication failed for user "nobody"',
        f"postgresql://semel@{host}/semel": "no password supplied",
        db.url.rpartition("/")[0] + "/nowhere": 'database "nowhere" does not exist',
    }
    db.run("CREATE ROLE sleeper PASSWORD 'tree'")
    wrong[f"postgresql://sleeper:tree@{host}/semel"] = 'role "sleeper" is not permitted to log in'
    try:
        for url, said in wrong.items():
            with pytest.raises(ConfigError, match=said) as caught:
                db.sink(url=url).check(TWO)
            assert lines(caught)[0].startswith("PostgreSQL refused the login: ")
            assert len(lines(caught)) == 3
    finally:
        db.run("DROP ROLE sleeper")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1:1"], ids=["no host", "no server"])
def test_a_server_that_is_not_there_is_unavailable(host: str) -> None:
    sink = Postgres(f"postgresql://semel:secret@{host}/semel", "orders", timeout_s=2)
    with closing(sink.participant(context())) as participant:
        for call in (partial(sink.check, TWO), participant.fence):
            with pytest.raises(SinkUnavailable, match=r"^PostgreSQL cannot be reached: .*") as caught:
                call()
            assert len(lines(caught)) == 3
            assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "postgresql://semel:hunter2@host:port/semel",
        "postgresql://semel:hunter2%zz@host/semel",
        "host=h password=hunter2 colour=blue",
        "postgresql://semel:hunter2@h/db?colour=blue",
    ],
)
def test_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(SemelError) as caught:
        Postgres(url, "orders", timeout_s=2).check(TWO)
    assert len(lines(caught)) == 3
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("password", ["hunt@er2", "hunt/er2", "hu@nt/er2", "hunt/e@r2?", "@", "hunter@"])
def test_a_password_with_a_bare_at_or_slash_is_not_taken_for_a_host(password: str) -> None:
    """libpq reads half of it as the name of a host, and everybody shows the name of a host."""
    with pytest.raises(ConfigError) as caught:
        Postgres(f"postgresql://semel:{password}@db.example/shop", "orders")
    assert lines(caught) == [
        "The url of a Postgres sink cannot be read.",
        "  the data now: nothing was started and no row was written",
        "  what to do: Write it as postgresql://user:password@host:5432/database, with %40 for @ and %2F for / in a "
        "password, or as `host=... dbname=...`.",
    ]


@pytest.mark.parametrize("password", ["p%40ss%2Fword", "p?ss:w#rd", "p'ss\\w", "%C3%A9"])
def test_other_passwords_are_fine(db: Database, password: str) -> None:
    role = f"guest_{db.schema}"
    with db.session() as connection:
        raw = psycopg.conninfo.conninfo_to_dict(f"postgresql://u:{password}@h/d")["password"]
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD {psycopg.sql.Literal(raw).as_string(connection)}")
    try:
        sink = db.sink(url=f"postgresql://{role}:{password}@{db.url.partition('@')[2]}")
        # It is in, and may not do more.
        with pytest.raises(ConfigError, match="permission denied for schema"):
            sink.check(TWO)
    finally:
        db.run(f"DROP ROLE {role}")


# Secrets ----------------------------------------------------------------------------------------------------------


def test_the_password_is_shown_nowhere(
    db: Database, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    password = psycopg.conninfo.conninfo_to_dict(db.url)["password"]
    assert isinstance(password, str)
    assert len(password) > 20
    shown: list[str] = []
    for url in (db.url, db.url.replace("127.0.0.1", "no-such-host.invalid")):
        for mode in MODES:
            sink = db.keyed(mode, url=url, timeout_s=2)
            branch = Branch(attempt(), sink.name, 0, 0)
            shown += [repr(sink), str(sink), sink.describe(), sink.name, repr(sink.place), repr(sink.capabilities)]
            shown += [repr(pickle.loads(pickle.dumps(sink)))]  # noqa: S301 - ours
            participant, writer = sink.participant(context()), sink.writer(branch)
            shown += [repr(participant), repr(writer), repr(participant.__dict__), repr(writer.__dict__)]
            try:
                participant.fence()
                writer.write(rows((1, "a")))
                part = writer.prepare()
                shown += [repr(part), repr(participant.prepare(attempt(), [part])), repr(participant.recover())]
                writer = sink.writer(branch)
                writer.write(rows((1, "a")).rename_columns(["id", "nothing"]))
            except SemelError as error:
                shown += ["".join(traceback.format_exception(error)), repr(error), repr(error.__context__)]
            finally:
                writer.abort()
                participant.close()
    captured = capfd.readouterr()
    text = "\n".join([*shown, caplog.text, captured.out, captured.err])
    assert len(shown) > 100
    assert password not in text
    assert "PostgreSQL table" in text


# Prepared transactions ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frugal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server as it comes, without prepared transactions."""
    with postgres(tmp_path_factory.mktemp("frugal"), settings={"max_prepared_transactions": "0"}, say=print) as server:
        yield server


def test_a_server_without_prepared_transactions(frugal: PostgresServer) -> None:
    database = Database(frugal.url)
    for sink in (database.keyed("prepared"), database.keyed("ledger", firm=True)):
        with pytest.raises(
            ConfigError, match=r"too few prepared transactions\. max_prepared_transactions is 0\.\n"
        ) as caught:
            sink.check(TWO)
        assert "Set max_prepared_transactions and restart the server" in lines(caught)[2]
    write(database.keyed("ledger"), rows((1, "a")))
    assert database.run("SELECT * FROM orders") == [(1, "a")]


def test_too_few_prepared_transactions_for_the_tasks(tmp_path: Path, spark: SparkSession) -> None:
    with postgres(tmp_path, settings={"max_prepared_transactions": "1"}, say=print) as server:
        database = Database(server.url)
        sink = database.keyed("prepared")
        batches = [rows((n, "a")) for n in range(3)]
        with started(sink) as participant:
            with pytest.raises(
                BatchFailed, match=r"too few prepared transactions.*max_prepared_transactions.*\(currently 1\)"
            ):
                prepare(participant, sink, attempt(), *batches)
            assert database.staged() == []
            assert commit(participant, prepare(participant, sink, attempt(0, 1), batches[0])) == {Outcome.COMMITTED}
        assert database.run("SELECT count(*) FROM orders") == [(1,)]
        firm = [database.keyed("ledger", table, firm=True) for table in ("a", "b")]
        with started(firm[0]) as first, started(firm[1]) as second:
            prepare(first, firm[0], attempt(), batches[0])
            with pytest.raises(BatchFailed, match="too few prepared transactions"):
                prepare(second, firm[1], attempt(), batches[0])
            first.abort(first.recover().branches)
        # How many tasks there are only the driver knows.
        four_tasks = spark.createDataFrame(
            spark.sparkContext.parallelize([(n, "a") for n in range(4)], 4), ["id", "text"]
        )
        with started(sink, context(2)), pytest.raises(BatchFailed) as caught:
            Staging(four_tasks, [sink], attempt(1, 0, 2)).stage(AS_PLANNED, ArrowLimit())
        assert "(currently 1)" in lines(caught)[0]
        assert "at least the number of tasks, here 4, in mode 'prepared'" in lines(caught)[2]
