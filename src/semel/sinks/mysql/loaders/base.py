"""What loads Arrow batches into a table, whichever way it takes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.sinks.mysql.types import Column, Encode, Unfit

if TYPE_CHECKING:
    import pyarrow as pa

#: One Arrow array of text holds 2 GiB; what is larger is encoded in parts.
BATCH_BYTES_MAX = 64 * 1024 * 1024
WARNINGS_SHOWN = 3
TURN_S_MAX = 5


def turn_of(target: str) -> str:
    """By which the tasks that load one table take turns, where all of them append to the same end of it.

    A table without a key of its own is an index over a number that counts up. Two sessions that fill its last page at a
    time spend as much on waiting for each other as on their rows (docs/performance.md); one after the other, the one
    loads while the other encodes.
    """
    return f"semel-turn-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Field:
    """A column of the rows: where it goes and how. One that takes no nulls gets none."""

    name: str
    encode: Encode
    column: Column


class Loader(ABC):
    """Loads batches into one table. What `add` keeps back is sent by `flush`, which comes last."""

    #: The name of a user lock of the server. Loaders of the same name send their rows one after another (`turn_of`).
    turn = ""

    def __init__(self, connection: Any, table: str, fields: Sequence[Field], packet_bytes_max: int) -> None:
        self.connection = connection
        self.table = table
        self.fields = fields
        self.packet_bytes_max = packet_bytes_max

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    def _run(self, statement: str, rows: int) -> None:
        self._send_in_turn(lambda: self.connection.cursor().execute(statement), rows)

    def _send_in_turn(self, send: Callable[[], Any], rows: int) -> None:
        """A turn is for speed only: a task that waits for one too long goes ahead, and takes none any more.

        A turn ends with its connection at the latest.
        """
        if self.turn:
            cursor = self.connection.cursor()
            cursor.execute("SELECT GET_LOCK(%s, %s)", (self.turn, TURN_S_MAX))
            if cursor.fetchone() != (1,):
                self.turn = ""
        send()
        require_taken(self.connection, rows)
        if self.turn:
            self.connection.cursor().execute("SELECT RELEASE_LOCK(%s)", (self.turn,))


def require_taken(connection: Any, rows: int | None) -> None:
    """A row that was left out or changed fails the batch, whatever the server thinks of it.

    Without a number, rows are not counted: a row that replaces another counts as two, or as none.
    """
    result = connection._result
    taken, warnings = result.affected_rows, result.warning_count
    if rows in (None, taken) and not warnings:
        return
    cursor = connection.cursor()
    cursor.execute(f"SHOW WARNINGS LIMIT {WARNINGS_SHOWN}")
    said = "; ".join(dict.fromkeys(str(row[2]).rstrip(".") for row in cursor.fetchall()))
    what = f"{rows - taken} of {rows} rows were left out" if rows not in (None, taken) else "rows were changed"
    raise Unfit(f"{what}: {said or 'the server does not say why'}")


def parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes > BATCH_BYTES_MAX and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from parts(batch.slice(0, half))
        yield from parts(batch.slice(half))
    else:
        yield batch


def as_text(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[pa.Array]:
    return [encoded(field, array, field.encode.text) for field, array in zip(fields, batch.columns, strict=True)]


def encoded(field: Field, array: pa.Array, encode: Callable[[pa.Array], Any]) -> Any:
    """A column in another form; what it cannot hold is named."""
    import pyarrow as pa

    if array.null_count and not field.column.nullable:
        raise Unfit(f"column {field.name}: it takes no nulls")
    try:
        return encode(array)
    except (pa.ArrowInvalid, Unfit) as error:
        raise Unfit(f"column {field.name}: {error}") from None
