"""A small batch that the driver writes itself: Spark computes the rows in the JVM, and no Python worker is needed.

The driver is one more task to the sinks: the same writers, the same failpoints, a branch of its own. If more comes than
was expected, it gives up, and tasks write the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from semel.runtime.task import TaskWriter
from semel.runtime.worker import acknowledge
from semel.sinks.base import StagedPart

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: What the driver holds of a batch at the most. It expected less; see `hands.DRIVER_BYTES`.
HELD_BYTES_MAX = 64 * 1024 * 1024
#: Spark numbers the tries of its tasks from 0 on. Those of the driver are none of them.
_TRIES = count(1_000_000_000)


class TooMuch(Exception):
    """More rows came than the driver takes. Nothing was written."""


def write_by_driver(frame: DataFrame, writer: TaskWriter) -> tuple[list[StagedPart], int]:
    """The parts that were staged, and how large a row is."""
    batches = rows_of(frame)
    rows = sum(batch.num_rows for batch in batches)
    size = sum(batch.nbytes for batch in batches)
    if size > HELD_BYTES_MAX:
        raise TooMuch(f"{rows} rows of {size} bytes")
    return writer.run(batches, 0, next(_TRIES)), size // max(rows, 1)


def rows_of(frame: DataFrame) -> Sequence[pa.RecordBatch]:
    """The rows in the order of their partitions, as tasks would get them.

    It is what `toArrow` does in public, which PySpark 3.5 has not. But what comes is acknowledged at once: Spark sends
    the schema and then the rows through a socket that has Nagle's algorithm on, so that without it the rows wait for an
    acknowledgement that the kernel delays by 40 ms (see `worker`).
    """
    from pyspark.errors.exceptions.captured import unwrap_spark_exception
    from pyspark.sql.pandas.serializers import ArrowCollectSerializer

    jdf: Any = frame._jdf
    serializer: Any = ArrowCollectSerializer()  # type: ignore[no-untyped-call]
    address, secret, server = jdf.collectAsArrowToPython()
    try:
        with _connected(address, secret) as stream:
            *batches, order = serializer.load_stream(stream)
    finally:
        # What failed in the JVM is raised here.
        with unwrap_spark_exception():
            server.getResult()
    return [batches[place] for place in order]


@contextmanager
def _connected(address: Any, secret: str) -> Iterator[Any]:
    """The stream of a server in Spark's JVM. Where PySpark has the function depends on its version."""
    from pyspark import java_gateway, util

    where: Any = util if hasattr(util, "local_connect_and_auth") else java_gateway
    connect = where.local_connect_and_auth
    stream, connection = connect(address, secret)
    try:
        # The job may run for longer than the connection had to be made in.
        connection.settimeout(None)
        acknowledge(connection)
        yield stream
    finally:
        stream.close()
        connection.close()
