"""MySQL and MariaDB: semel's exactly-once modes against Spark's JDBC writer, and against raw LOAD DATA as the limit.

python benchmarks/mysql.py [--rows 1000000] [--rounds 3] [--modes ledger,xa] [--json]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path[0] = str(Path(__file__).parents[1])

import pymysql  # noqa: E402
from benchmarks.tables import (  # noqa: E402
    KEY,
    PLAIN,
    ROWS_PER_INSERT,
    VERSIONS,
    Bench,
    arguments,
    measure,
    say,
    scratch_folder,
    write_text,
)

import semel  # noqa: E402
from semel.dev.mariadb import mariadb  # noqa: E402

SETTINGS = {"innodb_buffer_pool_size": "1G", "innodb_log_file_size": "1G"}
MODES = {"xa": PLAIN, "ledger": PLAIN, "upsert": KEY, "dedup": PLAIN, "versions": VERSIONS}
KEYS = {PLAIN: "", KEY: ", PRIMARY KEY (id)", VERSIONS: ", semel_version bigint, PRIMARY KEY (id, semel_version)"}
KEYED = ("upsert", "dedup", "versions")


@dataclass
class MySqlBench(Bench):
    modes: dict[str, str] = field(default_factory=lambda: dict(MODES))
    jar: str = "org.mariadb.jdbc:mariadb-java-client:3.5.6"

    def _run(self, sql: str) -> list[tuple[Any, ...]]:
        with connect(self.url) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def create(self, table: str, shape: str) -> None:
        columns = "id bigint, customer bigint, amount double, text varchar(64), at timestamp(6) NULL"
        self._run(f"CREATE TABLE {table} ({columns}{KEYS[shape]})")

    def count(self, table: str) -> int:
        return int(self._run(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - our own name

    def drop(self, table: str) -> None:
        self._run(f"DROP TABLE {table}")
        ids = self._run("SELECT table_name FROM information_schema.tables WHERE table_name RLIKE '^semel_(seen|due)_'")
        for (name,) in ids:
            self._run(f"DROP TABLE {name}")

    def jdbc(self, *, tuned: bool) -> dict[str, str]:
        at = urlsplit(self.url)
        more = {"batchsize": ROWS_PER_INSERT} if tuned else {}
        settings = "?sessionVariables=sql_mode=ANSI_QUOTES&connectionTimeZone=UTC"
        settings += "&rewriteBatchedStatements=true" * tuned
        return {
            "url": f"jdbc:mariadb://{at.hostname}:{at.port}{at.path}{settings}",
            "user": at.username or "",
            "password": at.password or "",
            "driver": "org.mariadb.jdbc.Driver",
            **more,
        }

    def sink(self, table: str, mode: str) -> semel.Sink:
        return semel.MySql(self.url, table, mode=mode, key=["id"] if mode in KEYED else [])

    def limits(self) -> dict[str, Any]:
        return {"limit": (write_text, _load)}


def connect(url: str) -> Any:
    at = urlsplit(url)
    return pymysql.connect(
        host=at.hostname,
        port=at.port,
        user=at.username,
        password=at.password or "",
        database=at.path.lstrip("/"),
        autocommit=True,
        local_infile=True,
    )


def _load(file: str, url: str, table: str) -> None:
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(f"LOAD DATA LOCAL INFILE %s INTO TABLE {table}", (file,))


def main() -> None:
    given = arguments(__doc__ or "")
    with scratch_folder() as folder, mariadb(folder / "mariadb", settings=SETTINGS, say=say) as server:
        measure(MySqlBench(given.rows, folder, server.url), given)


if __name__ == "__main__":
    main()
