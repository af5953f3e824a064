"""Who may write to MariaDB: what docs/sinks/mysql.md grants suffices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.dev.mariadb import mariadb
from semel.errors import BatchFailed
from semel.sinks.mysql.url import settings_of
from semel.testing.harness import attempt
from tests.sinks.mysql_rig import MODES, Database, write
from tests.sinks.participants import prepare, rows, started

DOCS = Path(__file__).parents[2] / "docs" / "sinks" / "mysql.md"


@pytest.fixture(scope="module")
def boss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The login of a server that knows two others: a clerk, and one who may create views."""
    on_rows, on_views = (
        re.search(rf"^GRANT {what}.* ON shop\.\* TO", DOCS.read_text(), re.M) for what in ("SELECT", "CREATE VIEW")
    )
    assert on_rows
    assert on_views
    folder = tmp_path_factory.mktemp("mariadb_access")
    folder.chmod(0o755)
    statements = []
    for user, grants in (("clerk", [on_rows]), ("viewer", [on_rows, on_views])):
        statements.append(f"CREATE USER {user}@'%' IDENTIFIED BY 'sesame';")
        statements += [f"{grant[0].replace('shop', 'semel')} {user}@'%';" for grant in grants]
    (folder / "users.sql").write_text("\n".join(statements) + "\n")
    with mariadb(folder / "data", settings={"init_file": str(folder / "users.sql")}, say=print) as server:
        yield Database(server.url)


def url_of(boss: Database, user: str) -> str:
    at = settings_of(boss.url)
    return f"mysql://{user}:sesame@{at['host']}:{at['port']}/semel"


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_grants_of_the_docs_suffice(boss: Database, mode: str, firm: bool) -> None:
    """Alone and beside other sinks, the table and all that is made beside it included."""
    user = "viewer" if mode == "versions" else "clerk"
    table = f"orders_{mode}_{firm}".lower()
    sink = boss.sink(mode, url=url_of(boss, user), table=table, name=table, firm=firm, versions_kept=mode == "versions")
    write(sink, [rows((1, "a")), rows((2, "b"))], rows((2, "c")))
    expected = {"dedup": ["a", "b"], "upsert": ["a", "c"], "versions": ["a", "c"]}.get(mode, ["a", "b", "c"])
    assert [text for (text,) in boss.run(f"SELECT text FROM {table} ORDER BY 1")] == expected  # noqa: S608 - ours


def test_the_view_takes_a_right_of_its_own(boss: Database) -> None:
    sink = boss.sink("versions", url=url_of(boss, "clerk"), table="unseen", name="unseen")
    with (
        started(sink) as participant,
        pytest.raises(BatchFailed, match=r"CREATE VIEW command denied(.|\n)*GRANT this user"),
    ):
        prepare(participant, sink, attempt(), rows((1, "a")))
