"""The sources of a streaming query, as Spark's plan names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        return PlannedSource(str(source.className()), _lower(_scala_dict(source.options())))
    return PlannedSource(kind)


def _lower(options: Mapping[str, Any]) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in options.items()}


def _java_dict(java_map: Any) -> dict[str, Any]:
    """Py4J's own iterator ends with an exception of the JVM, which takes longer than all the rest."""
    return {key: java_map.get(key) for key in java_map.keySet().toArray()}


def _scala_dict(scala_map: Any) -> dict[str, Any]:
    keys = scala_map.keysIterator()
    found = {}
    while keys.hasNext():
        key = keys.next()
        found[key] = scala_map.apply(key)
    return found
