"""What Spark keeps in a checkpoint folder, as far as semel reads it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from semel.decisions.base import RecordStore, StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.decisions.stores import open_store
from semel.errors import CheckpointUnusable
from semel.ids import PipelineId, pipeline_id
from semel.runtime.durability import CheckpointSync
from semel.runtime.offsets import offsets_of
from semel.runtime.plans import SparkPlans

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_FOLDER = "semel"


class Checkpoint:
    """What Spark keeps in a checkpoint folder, as far as semel reads it."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        self.store: RecordStore = open_store(spark, location)
        self.log = DecisionLog(open_store(spark, f"{location.rstrip('/')}/{LOG_FOLDER}"))
        self.plans = SparkPlans(self.store)

    def query_id(self) -> PipelineId | None:
        """Spark's id of the query, or None before its first start."""
        content = self.store.read("metadata")
        if content is None:
            return None
        try:
            return pipeline_id(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointUnusable(
                f"The file metadata in {self.location} does not hold a Spark query id.",
                remedy="Restore the checkpoint folder from a copy, or name a fresh checkpointLocation.",
            ) from None

    def ensure_query_id(self) -> PipelineId:
        """Spark's id of the query. A fresh checkpoint gets one where Spark looks for it, in Spark's own form.

        So the id is known before the first start, and everything can be claimed and recovered before Spark begins.
        """
        known = self.query_id()
        if known is None:
            # A checkpoint whose log is there has lost the file, in a power cut for one: it is the same query.
            found = self.log.identity()
            query_id = found.pipeline if found is not None else str(uuid.uuid4())
            with self._writing():
                self.store.create("metadata", json.dumps({"id": query_id}).encode())
            known = self.query_id()  # somebody else's, had they been quicker
        if known is None:
            raise CheckpointUnusable(f"The file metadata in {self.location} was written and is not there.")
        return known

    def keep_query_id(self, sync: CheckpointSync) -> None:
        """Spark gives itself another id when it has lost this one, and our log would be that of another query."""
        with self._writing():
            sync.keep("metadata")

    def require_writable(self) -> None:
        """Raise now rather than in the middle of the first batch."""
        probe = f"probe-{uuid.uuid4().hex}"
        with self._writing():
            self.log.store.create(probe, b"")
            self.log.store.delete(probe)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StoreUnanswered) as error:
            raise CheckpointUnusable(f"The checkpoint folder {self.location} cannot be written: {error}.") from None

    def offsets(self, batch: int) -> bytes | None:
        """What Spark has planned a batch to read, as it stands in Spark's log."""
        return self.store.read(offsets_of(batch))
