"""The built-in kind of pipeline with a bug seeded into semel's own code, named by SEMEL_TEST_BUG.

It is patched in where the driver runs, so that nothing but the file knows of it.
"""

import os
from typing import Any

from pyspark.sql import SparkSession

import semel
from semel.protocol.events import Committable
from semel.runtime import startup
from semel.sinks.base import StagedPart
from semel.sinks.sqlite.sink import _SqliteParticipant

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


def the_ledger_is_not_asked() -> None:
    """A commit that is repeated writes the rows again."""
    patched: Any = _SqliteParticipant
    patched._marker = lambda self, batch: False  # noqa: ARG005 - the bug
    patched._write_marker = lambda self, committable: None  # noqa: ARG005 - the bug


def prepare_commits() -> None:
    """The rows are visible before anybody has decided."""
    real = _SqliteParticipant.prepare

    def prepare(self: Any, attempt: Any, parts: list[StagedPart]) -> tuple[Committable, ...]:
        made = real(self, attempt, parts)
        self.database.commit()
        return made

    patched: Any = _SqliteParticipant
    patched.prepare = prepare


def a_start_does_not_sweep() -> None:
    """What a dead driver has staged stays for ever."""
    patched: Any = startup
    patched.sweep = lambda *_: 0


BUGS = {bug.__name__: bug for bug in (the_ledger_is_not_asked, prepare_commits, a_start_does_not_sweep)}


@semel.pipeline
def orders(spark: SparkSession) -> semel.StreamWriter:
    # Not when the file is imported: the test's own process does that, too, and goes on to other tests.
    BUGS[os.environ["SEMEL_TEST_BUG"]]()
    rows = spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")
    return semel.write(rows).to(semel.Sqlite(f"{FOLDER}/out.db", "orders")).option("checkpointLocation", FOLDER)
