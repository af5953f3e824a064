"""Names of pipelines, attempts and branches: the only place that spells or parses one.

A pipeline is known by Spark's query id (the `id` in the checkpoint's `metadata`): it stays the same across restarts
and is new for a new checkpoint. A batch is known by (pipeline, batch id), never by (partition, epoch), because the
task layout may change when a batch is replayed (SPARK-28650).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

PipelineId = NewType("PipelineId", str)
Incarnation = NewType("Incarnation", int)

_PIPELINE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SINK_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_BRANCH = re.compile(
    r"semel-(?P<pipeline>[0-9a-f-]{36})-(?P<sink>[a-z][a-z0-9_]*)"
    r"-b(?P<batch>\d+)-a(?P<attempt>\d+)-i(?P<incarnation>\d+)-t(?P<task>\d+)-r(?P<retry>\d+)"
)


def pipeline_id(text: str) -> PipelineId:
    """The id of a pipeline, checked: it becomes part of file names, table rows and transaction names."""
    if not _PIPELINE.fullmatch(text):
        raise ValueError(f"not a Spark query id: {text!r}")
    return PipelineId(text)


def sink_name(text: str) -> str:
    """A sink's name, checked: lower-case letters, digits and underscores, at most 40."""
    if not _SINK_NAME.fullmatch(text):
        raise ValueError(f"not a sink name: {text!r}: use a-z, 0-9 and _, a letter first, at most 40 characters")
    return text


def to_sink_name(text: str) -> str:
    """A usable sink name made of any text, for sinks that the user did not name."""
    return ("s" + re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_"))[:40] if not _SINK_NAME.fullmatch(text) else text


@dataclass(frozen=True, order=True)
class Attempt:
    """One try at one batch. The number `attempt` is the slot of the batch's journal in which it may be decided."""

    pipeline: PipelineId
    batch: int
    attempt: int
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"batch {self.batch} attempt {self.attempt} (incarnation {self.incarnation})"


@dataclass(frozen=True, order=True)
class Branch:
    """What one task wrote for one sink in one attempt. `retry` keeps Spark's own task retries apart."""

    attempt: Attempt
    sink: str
    task: int
    retry: int

    def __str__(self) -> str:
        a = self.attempt
        return f"semel-{a.pipeline}-{self.sink}-b{a.batch}-a{a.attempt}-i{a.incarnation}-t{self.task}-r{self.retry}"


def parse_branch(text: str) -> Branch | None:
    """The branch that a name spells, or None when the name is not one of ours."""
    match = _BRANCH.fullmatch(text)
    if match is None:
        return None
    number = {key: int(match[key]) for key in ("batch", "attempt", "incarnation", "task", "retry")}
    attempt = Attempt(
        PipelineId(match["pipeline"]), number["batch"], number["attempt"], Incarnation(number["incarnation"])
    )
    branch = Branch(attempt, match["sink"], number["task"], number["retry"])
    # Leading zeros and digits of other scripts are numbers too, but we never spell a name so.
    return branch if str(branch) == text else None
