"""The columns that make a record: those of Spark's own Kafka sink, and `timestamp`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from semel.errors import SchemaMismatch

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns that only confluent-kafka's own `produce` takes.
BY_ROW = ("headers", "timestamp")


def check_columns(schema: pa.Schema, *, topic: str, target: str) -> None:
    """Raise SchemaMismatch unless rows of this schema are Kafka records."""
    problems = [
        f"{field.name} is {field.type}, not {wanted}"
        for field in schema
        for wanted, fits in [_WANTED.get(field.name, ("", lambda _: True))]
        if not fits(field.type)
    ]
    unknown = [name for name in schema.names if name not in _WANTED]
    if unknown:
        problems.append(f"{', '.join(unknown)} would be dropped")
    if "value" not in schema.names:
        problems.append("there is no column value")
    if not topic and "topic" not in schema.names:
        problems.append("there is no column topic, and the sink names none")
    if problems:
        raise SchemaMismatch(
            f"{target} cannot take these rows: {'; '.join(problems)}.",
            remedy="Select the record's columns: key, value, headers, topic, partition, timestamp; for example "
            'select=["CAST(id AS STRING) AS key", "to_json(struct(*)) AS value"].',
        )


def rows_by_topic(batch: pa.RecordBatch, topic: str) -> Iterator[tuple[str, Mapping[str, pa.Array], int]]:
    """The rows of each topic, in their order. A sink that names a topic writes there, whatever the column says."""
    import pyarrow.compute as pc

    columns = {name: _plain(batch.column(name)) for name in batch.schema.names if name != "topic"}
    if topic:
        yield topic, columns, batch.num_rows
        return
    topics = batch.column("topic")
    if topics.null_count:
        raise ValueError(f"{topics.null_count} rows have no topic")
    names = pc.unique(topics).to_pylist()
    for name in names:
        if len(names) == 1:
            yield name, columns, batch.num_rows
        else:
            wanted = pc.equal(topics, name)
            chosen = {column: array.filter(wanted) for column, array in columns.items()}
            yield name, chosen, len(chosen["value"])


def _plain(array: pa.Array) -> pa.Array:
    """Text and bytes in the layouts that have one buffer of offsets and one of data."""
    import pyarrow as pa

    if pa.types.is_fixed_size_binary(array.type) or array.type in (pa.binary_view(), pa.null()):
        return array.cast(pa.binary())
    return array.cast(pa.string()) if array.type == pa.string_view() else array


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    t = pa.types
    return any(
        is_kind(kind)
        for is_kind in (
            t.is_string,
            t.is_large_string,
            t.is_binary,
            t.is_large_binary,
            t.is_fixed_size_binary,
            t.is_null,
        )
    )


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_headers(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if not (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    fields = {kind.value_type.field(i).name: kind.value_type.field(i).type for i in range(kind.value_type.num_fields)}
    return set(fields) == {"key", "value"} and _is_text(fields["key"]) and _is_bytes(fields["value"])


def _is_int(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_int32(kind))


def _is_timestamp(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind))


_WANTED = {
    "key": ("string or binary", _is_bytes),
    "value": ("string or binary", _is_bytes),
    "headers": ("array<struct<key string, value binary>>", _is_headers),
    "topic": ("string", _is_text),
    "partition": ("int", _is_int),
    "timestamp": ("timestamp", _is_timestamp),
}
