"""What goes wrong with MySQL: logins, urls, servers that are away or too old, their errors, tasks that meet."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pymysql
import pytest

import semel.sinks.mysql.writer  # noqa: F401 - it comes with the first row, and would keep what a test plays then
from semel.dev.mariadb import MariaDbServer
from semel.errors import BatchFailed, ConfigError, MissingExtra, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.mysql import MySql
from semel.sinks.mysql import connection as mysql_connection
from semel.sinks.mysql import store as mysql_store
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.url import settings_of
from semel.testing.harness import attempt, context
from tests.sinks.mysql_rig import MODES, Database, commit, db, own_server, write
from tests.sinks.participants import error_of, prepare, rows, stage_at_once, started
from tests.sinks.postgres_rig import eventually

__all__ = ["db", "own_server"]


def test_a_wrong_login_is_an_error_of_the_pipeline_and_shows_no_password(db: Database) -> None:
    settings = settings_of(db.url)
    where = f"{settings['host']}:{settings['port']}"
    urls = [
        f"mysql://semel:geheim-42@{where}/semel",
        f"mysql://nobody:geheim-42@{where}/semel",
        db.url.removesuffix("/semel") + "/nowhere",
        db.url + "?ssl_ca=/nowhere/geheim-42.pem",
    ]
    for url in urls:
        with pytest.raises(ConfigError) as caught:
            db.sink(url=url).check(rows().schema)
        assert "geheim-42" not in "".join(map(str, _chain(caught.value))).replace("/nowhere/geheim-42.pem", "")
        assert settings["password"].decode() not in "".join(map(repr, _chain(caught.value)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_a_server_that_is_away_is_waited_for(db: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sink = db.sink(url=f"mysql://u:geheim-42@127.0.0.1:{port}/semel", timeout_s=1)
        began = time.monotonic()
        with pytest.raises(SinkUnavailable, match="MySQL cannot be reached"):
            sink.check(rows().schema)
        assert time.monotonic() - began < 10
    with pytest.raises(SinkUnavailable, match="MySQL cannot be reached: Can't connect") as caught:
        sink.check(rows().schema)
    assert "geheim-42" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:geheim-42@h/db",
        "mysql://u:geheim-42@h:port/db",
        "mysql://u:12/geheim-42@h/db",
        "mysql://u:geheim@-42@h/db",
        "mysql://u:1?geheim-42=x@h/db",
        "mysql://u:1#geheim-42@h/db",
        "mysql://h/db",
        "mysql://u:geheim-42@/db",
        "mysql://u:geheim-42@h/",
        "mysql://u:geheim-42@h/db?ssl_nonsense=geheim-42",
        "geheim-42",
    ],
)
def test_a_url_that_cannot_be_used_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MySql(url, "orders")
    assert "geheim" not in "".join(map(repr, _chain(caught.value)))


def test_what_a_url_says() -> None:
    found = settings_of("mysql://us%40er:p%C5%BE%2F%3F@h:3307/my%20db?ssl_ca=/ca.pem&ssl_verify_identity=true")
    expected = {"host": "h", "port": 3307, "user": "us@er", "password": "pž/?".encode(), "database": "my db"}
    assert found == expected | {"ssl_ca": "/ca.pem", "ssl_verify_identity": True, "ssl_verify_cert": True}
    assert settings_of("mariadb://u@h/db")["port"] == 3306


def test_the_password_is_shown_nowhere(db: Database) -> None:
    sink = db.sink(url="mysql://u:geheim-42@h/db")
    shown = f"{sink!r} {sink} {sink.describe()} {sink.place!r} {sink.name}"
    assert "geheim-42" not in shown
    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - our own bytes
    assert sink.describe() == f"MySQL table {db.table} in db at h"


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="no names of more than 64 letters"):
        MySql("mysql://u@h/db", "x" * 65)
    with pytest.raises(ConfigError, match=r"no names of more than 64 letters: '.*_latest'"):
        MySql("mysql://u@h/db", "x" * 60, mode="versions", key="id")


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pymysql", None)
    with pytest.raises(MissingExtra, match=r"The MySql sink needs PyMySQL(.|\n)*pip install 'semel\[mysql\]'"):
        MySql("mysql://u@h/db", "orders").check(rows().schema)


#: number of the error -> what it is for the coordinator.
ERRORS: dict[int, type[SemelError]] = {
    1020: SinkUnavailable,
    1205: SinkUnavailable,
    1213: SinkUnavailable,
    1040: SinkUnavailable,
    1053: SinkUnavailable,
    1290: SinkUnavailable,
    1614: SinkUnavailable,
    1927: SinkUnavailable,
    2002: SinkUnavailable,
    2003: SinkUnavailable,
    2006: SinkUnavailable,
    2013: SinkUnavailable,
    1062: BatchFailed,
    1142: BatchFailed,
    1146: BatchFailed,
    1264: BatchFailed,
}


@pytest.mark.parametrize("number", ERRORS)
def test_errors_of_the_server_are_told_apart(number: int) -> None:
    sink = MySql("mysql://u@h/db", "orders")
    with (
        pytest.raises(ERRORS[number]) as caught,
        sink.translated("refused", refused=BatchFailed),
    ):
        raise pymysql.err.OperationalError(number, "said the server")
    assert str(caught.value).startswith("MySQL table orders in db at h refused: said the server.\n")
    assert ("GRANT" in str(caught.value)) == (number == 1142)


def test_a_closed_connection_is_away() -> None:
    sink = MySql("mysql://u@h/db", "orders")
    with pytest.raises(SinkUnavailable, match="the connection is closed"), sink.translated("x", refused=BatchFailed):
        raise pymysql.err.InterfaceError(0, "")


def test_a_user_who_may_not_list_xa_transactions_is_told_so(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """MySQL asks for XA_RECOVER_ADMIN; MariaDB does not, so the refusal is played."""

    def refused(_run: Any) -> set[Branch]:
        raise pymysql.err.OperationalError(1401, "XAER_RMERR: Fatal error occurred in the transaction branch")

    monkeypatch.setattr("semel.sinks.mysql.sink.prepared_branches", refused)
    monkeypatch.setattr(mysql_store, "prepared_branches", refused)
    for sink in (db.sink("xa"), db.sink(firm=True)):
        with pytest.raises(ConfigError, match="GRANT XA_RECOVER_ADMIN"):
            sink.check(rows().schema)
    # Where there are none to end the right is not needed.
    write(db.sink(), rows((1, "a")))
    assert db.rows() == [(1, "a")]


@pytest.mark.parametrize(
    ("version", "fits"),
    [("8.0.36", True), ("5.7.44-log", False), ("5.5.5-10.11.2-MariaDB", True), ("10.4.1-MariaDB", False)],
)
def test_servers_that_are_too_old_are_refused(db: Database, version: str, fits: bool) -> None:
    class Old:
        def get_server_info(self) -> str:
            return version

    with closing(db.sink().place.connect()) as connection:
        run = mysql_connection.runner(connection, db.sink().place)
        if fits:
            db.sink()._check_server(Old(), run)
        else:
            with pytest.raises(ConfigError, match="which is too old"):
                db.sink()._check_server(Old(), run)


def test_mariadb_with_a_binary_log_is_warned_of(own_server: MariaDbServer, caplog: pytest.LogCaptureFixture) -> None:
    """MDEV-21469. The same server without it, and modes without XA, are left in peace."""
    db = Database(own_server.url)
    caplog.set_level(logging.WARNING, "semel")
    db.sink("xa").check(rows().schema)
    assert caplog.messages == []
    own_server.stop()
    own_server.settings.update({"log_bin": "bin", "server_id": "1", "innodb_flush_log_at_trx_commit": "2"})
    own_server.start()
    try:
        db.sink().check(rows().schema)
        assert [message.split(": ")[1] for message in caplog.messages] == [
            "innodb_flush_log_at_trx_commit is 2",
            "the server has its binary log on and sync_binlog is 0",
        ]
        for sink in (db.sink("xa"), db.sink(firm=True)):
            caplog.clear()
            sink.check(rows().schema)
            assert "MDEV-21469" in caplog.messages[2]
        write(db.sink("xa"), rows((1, "a")), rows((2, "b")))
        assert db.rows() == [(1, "a"), (2, "b")]
    finally:
        own_server.stop()
        for name in ("log_bin", "server_id"):
            del own_server.settings[name]
        own_server.settings["innodb_flush_log_at_trx_commit"] = "1"
        own_server.start()


DEADLOCK, WAITED_IN_VAIN = "Deadlock found when trying to get lock", "Lock wait timeout exceeded"
CHANGED = "Record has changed since last read in table"
FAILURES = (DEADLOCK, WAITED_IN_VAIN, CHANGED)


@contextmanager
def met_by_another(database: Database, failure: str) -> Iterator[Callable[[], None]]:
    """Another session has changed row 2. What is yielded waits for who waits for it, and makes its move fail."""
    with database.session() as other:
        other.execute("BEGIN")
        # Of two who wait for each other the one who has changed less is rolled back.
        other.execute(f"UPDATE {database.table} SET text = 'heavy' WHERE id >= 100")  # noqa: S608 - ours
        other.execute(f"UPDATE {database.table} SET text = 'other' WHERE id = 2")  # noqa: S608 - ours

        def collide() -> None:
            assert eventually(lambda: _somebody_waits(database))
            if failure == DEADLOCK:
                other.execute(f"UPDATE {database.table} SET text = 'other' WHERE id = 1")  # noqa: S608 - ours
            if failure != WAITED_IN_VAIN:
                other.execute("COMMIT")

        yield collide


def _somebody_waits(database: Database) -> bool:
    ((_, waits),) = database.run("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
    return int(waits) > 0


@pytest.fixture
def _snapshot_isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default since MariaDB 11.6: who comes too late for a row is refused, in any isolation of transactions.

    Requests that tasks have stored read nothing, so they are never too late: that takes a plain stage.
    """
    settings = f"{mysql_connection.MARIADB_SESSION}, innodb_snapshot_isolation = ON"
    monkeypatch.setattr(mysql_connection, "MARIADB_SESSION", settings)
    if request.node.callspec.params["failure"] == CHANGED:
        monkeypatch.setattr(mysql_wire, "WANTED", 0)


HEAVY = [(number, "light") for number in range(100, 120)]


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.usefixtures("_snapshot_isolation")
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_the_move_is_no_outcome_and_works_when_tried_again(db: Database, failure: str, firm: bool) -> None:
    sink = db.sink("upsert", firm=firm, timeout_s=1 if failure == WAITED_IN_VAIN else 5)
    write(sink, rows((1, "a"), (2, "b"), *HEAVY))
    with started(sink, context(2)) as participant:
        (part,) = stage_at_once(sink, attempt(1), rows((1, "x"), (2, "y"), (3, "z")))
        with met_by_another(db, failure) as collide:
            assert error_of(partial(participant.prepare, attempt(1), [part]), collide).startswith(failure)
        assert len(db.rows()) == 22
        assert commit(participant, participant.prepare(attempt(1), [part])) is Outcome.COMMITTED
    assert db.rows()[:3] == [(1, "x"), (2, "y"), (3, "z")]
    assert db.staged() == []


@pytest.mark.usefixtures("_snapshot_isolation")
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_the_move_after_the_decision_is_no_outcome_and_works_when_tried_again(
    db: Database, failure: str
) -> None:
    """A driver that is started again has nothing but what is staged."""
    sink = db.sink("upsert", timeout_s=1 if failure == WAITED_IN_VAIN else 5)
    write(sink, rows((1, "a"), (2, "b"), *HEAVY))
    with started(sink) as participant:
        (promise,) = prepare(participant, sink, attempt(1), rows((1, "x"), (2, "y"), (3, "z")))
    with started(sink, context(2)) as participant:
        with met_by_another(db, failure) as collide:
            assert error_of(partial(participant.commit, promise), collide).startswith(failure)
        assert len(db.rows()) == 22
        assert participant.commit(promise) is Outcome.COMMITTED
        assert participant.commit(promise) is Outcome.ALREADY_COMMITTED
    assert db.rows()[:3] == [(1, "x"), (2, "y"), (3, "z")]
    assert db.staged() == []


@pytest.mark.parametrize("mode", MODES)
def test_tasks_that_begin_at_the_same_moment_create_what_is_missing_once(own_server: MariaDbServer, mode: str) -> None:
    """On a server of our own: the table of versions is for all, and must be missing, too."""
    db = Database(own_server.url)
    for number in range(3):
        db.run("DROP TABLE IF EXISTS semel_versions")
        name = f"orders_{number}{db.suffix}"
        sink = db.sink(mode, table=name, name=name)
        with started(sink) as participant:
            parts = stage_at_once(sink, attempt(), *(rows((task, "x")) for task in range(4)))
            assert commit(participant, participant.prepare(attempt(), parts)) is Outcome.COMMITTED
        assert db.run(f"SELECT count(*) FROM {sink.table}") == [(4,)]  # noqa: S608 - our own name
    assert db.staged() == []
