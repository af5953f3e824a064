"""The sources of a streaming query, as Spark's plan names them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlannedSource:
    """One source of a query. The names of its options are in lower case; their values may be secrets."""

    format: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_kafka(self) -> bool:
        return self.format.lower() == "kafka" or self.format.endswith("KafkaSourceProvider")


#: Options that say what a source reads, and none of how. Values of others may be secrets, or change at will.
#: Brokers come and go; when a pipeline moves house, its checkpoint and their addresses change together.
_WHAT = (
    "path",
    "topic",
    "subscribe",
    "subscribepattern",
    "assign",
    "host",
    "port",
    "table",
    "dbtable",
    "streamname",
)
#: Its order means nothing.
_LIST = "subscribe"


def known_by(sources: Sequence[PlannedSource]) -> str:
    """What a pipeline is known by that nobody has named: what it reads, wherever its checkpoint is."""
    read = [[_format_of(source), *(_said(source, option) for option in _WHAT)] for source in sources]
    return f"unnamed-{hashlib.sha256(json.dumps(read).encode()).hexdigest()[:12]}"


def _format_of(source: PlannedSource) -> str:
    return "kafka" if source.is_kafka else source.format.lower()


def _said(source: PlannedSource, option: str) -> str:
    value = source.options.get(option, "")
    if option == _LIST:
        return ",".join(sorted(part.strip() for part in value.split(",")))
    if option == "path":
        # A local path has two spellings, and a folder too.
        return re.sub(r"^file:/+", "/", value).rstrip("/")
    return value


def planned_sources(plan: Any) -> list[PlannedSource]:
    """Every source of a streaming plan (a JVM LogicalPlan), in the order in which Spark logs their offsets."""
    return [_source(leaf) for leaf in _leaves(plan) if leaf.isStreaming()]


def _leaves(plan: Any) -> Iterator[Any]:
    leaves = plan.collectLeaves()
    for index in range(leaves.size()):
        yield leaves.apply(index)


def _source(leaf: Any) -> PlannedSource:
    """A leaf of a kind that is not known still counts: it has its place among the offsets."""
    kind = str(leaf.getClass().getSimpleName())
    if kind == "StreamingRelationV2":
        return PlannedSource(str(leaf.sourceName()), _lower(_java_dict(leaf.extraOptions().asCaseSensitiveMap())))
    if kind == "StreamingRelation":
        source = leaf.dataSource()
        return PlannedSource(str(source.className()), _lower(scala_dict(source.options())))
    return PlannedSource(kind)


def _lower(options: Mapping[str, Any]) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in options.items()}


def _java_dict(java_map: Any) -> dict[str, Any]:
    """Py4J's own iterator ends with an exception of the JVM, which takes longer than all the rest."""
    return {key: java_map.get(key) for key in java_map.keySet().toArray()}


def scala_dict(scala_map: Any) -> dict[str, Any]:
    keys = scala_map.keysIterator()
    found = {}
    while keys.hasNext():
        key = keys.next()
        found[key] = scala_map.apply(key)
    return found
