"""PostgreSQL: semel's exactly-once modes against Spark's JDBC writer, and against raw COPY as the limit.

python benchmarks/postgres.py [--rows 1000000] [--rounds 3] [--modes ledger,prepared] [--json]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path[0] = str(Path(__file__).parents[1])

import psycopg  # noqa: E402
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
from semel.dev.postgres import postgres  # noqa: E402

SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
MODES = {"prepared": PLAIN, "ledger": PLAIN, "upsert": KEY, "dedup": PLAIN, "versions": VERSIONS}
KEYS = {PLAIN: "", KEY: ", PRIMARY KEY (id)", VERSIONS: ", semel_version bigint, PRIMARY KEY (id, semel_version)"}
KEYED = ("upsert", "dedup", "versions")


@dataclass
class PostgresBench(Bench):
    modes: dict[str, str] = field(default_factory=lambda: dict(MODES))
    jar: str = "org.postgresql:postgresql:42.7.7"

    def _run(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def create(self, table: str, shape: str) -> None:
        columns = "id bigint, customer bigint, amount double precision, text text, at timestamptz"
        self._run(f"CREATE TABLE {table} ({columns}{KEYS[shape]})")
        self._run("CHECKPOINT")

    def count(self, table: str) -> int:
        return int(self._run(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - our own name

    def drop(self, table: str) -> None:
        self._run(f"DROP TABLE {table}")
        ids = self._run("SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^semel_(seen|due)_'")
        for (name,) in ids:
            self._run(f"DROP TABLE {name}")

    def jdbc(self, *, tuned: bool) -> dict[str, str]:
        at = urlsplit(self.url)
        more = {"batchsize": ROWS_PER_INSERT} if tuned else {}
        return {
            "url": f"jdbc:postgresql://{at.hostname}:{at.port}{at.path}" + "?reWriteBatchedInserts=true" * tuned,
            "user": at.username or "",
            "password": at.password or "",
            "driver": "org.postgresql.Driver",
            **more,
        }

    def sink(self, table: str, mode: str) -> semel.Sink:
        return semel.Postgres(self.url, table, mode=mode, key=["id"] if mode in KEYED else [])

    def limits(self) -> dict[str, Any]:
        """COPY as it comes reads text, as LOAD DATA does. Rows that are in the binary form already cost it half.

        The figures by which the targets were set (524 of 655 thousand rows a second is 0.8) are those of text.
        """
        return {"limit": (write_text, _load_text), "limit_binary": (_write_binary, _load_binary)}


def _write_binary(source: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from semel.sinks.postgres.copy import HEADER, TRAILER, encode_rows
    from semel.sinks.postgres.types import Column, encoder

    types = {"id": "int8", "customer": "int8", "amount": "float8", "text": "text", "at": "timestamptz"}
    table = pq.read_table(source)
    # Spark writes timestamps in a form of its own, without a zone.
    table = table.set_column(4, "at", table["at"].cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC")))
    encoders = [encoder(f.type, Column(f.name, types[f.name])) for f in table.schema]
    with target.open("wb") as out:
        out.write(HEADER)
        for batch in table.to_batches(max_chunksize=10_000):
            for rows in encode_rows(batch, encoders):  # type: ignore[arg-type]
                out.write(rows)
        out.write(TRAILER)


def _load_text(file: str, url: str, table: str) -> None:
    _load(file, url, f"COPY {table} FROM STDIN")


def _load_binary(file: str, url: str, table: str) -> None:
    _load(file, url, f"COPY {table} FROM STDIN (FORMAT binary)")


def _load(file: str, url: str, statement: str) -> None:
    with (
        psycopg.connect(url, options="-c timezone=UTC") as connection,
        connection.cursor().copy(statement) as copy,
        Path(file).open("rb") as source,
    ):
        while block := source.read(1 << 20):
            copy.write(block)


def main() -> None:
    given = arguments(__doc__ or "")
    with scratch_folder() as folder, postgres(folder / "postgres", settings=SETTINGS, say=say) as server:
        measure(PostgresBench(given.rows, folder, server.url), given)


if __name__ == "__main__":
    main()
