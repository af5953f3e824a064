"""Several bounds explored one after the other, and what came of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from semel.model.adversary import Model
from semel.model.checker import Result, Violation, check
from semel.model.mutants import Hunt
from semel.model.properties import ALWAYS
from semel.model.trace import mermaid, numbered
from semel.model.world import Bounds

#: Told what is being done: a line for people.
Say = Callable[[str], None]
#: The name of a way that leads to a step of the unchanged protocol.
REACHED = "reached"


@dataclass(frozen=True)
class Report:
    """The verdict is true when all holds everywhere, false when something does not, "unknown" when a search was cut."""

    parts: tuple[tuple[Bounds, Result], ...]

    @property
    def states(self) -> int:
        return sum(result.states for _, result in self.parts)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for _, result in self.parts)

    @property
    def holds(self) -> bool:
        return all(result.holds for _, result in self.parts)

    @property
    def verdict(self) -> str:
        if any(result.violations or result.missing for _, result in self.parts):
            return "false"
        return "true" if self.holds else "unknown"

    def always(self) -> dict[str, str]:
        """Whether each property holds. After a violation or a cut the others are not known."""
        broken = {v.name for _, result in self.parts for v in result.violations}
        rest = "holds" if all(result.complete for _, result in self.parts) else "unknown"
        return {name: "violated" if name in broken else rest for name in ALWAYS}

    def reached(self) -> list[str]:
        return sorted({f"{kind} {name}" for _, result in self.parts for kind, name in result.reached})

    def missing(self) -> list[str]:
        return sorted({f"{kind} {name}" for _, result in self.parts for kind, name in result.missing})

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "states": self.states,
            "transitions": sum(result.transitions for _, result in self.parts),
            "depth": max(result.depth for _, result in self.parts),
            "violations": [
                {
                    "property": v.name,
                    "text": v.text,
                    "trace": numbered(v.trace),
                    "mermaid": picture(v, bounds),
                    "bounds": asdict(bounds),
                }
                for bounds, result in self.parts
                for v in result.violations
            ],
            "properties": {"always": self.always(), "sometimes": self.reached(), "never": self.missing()},
            "seconds": round(self.seconds, 3),
            "bounds": [
                {**asdict(b), "states": r.states, "depth": r.depth, "seconds": round(r.seconds, 3)}
                for b, r in self.parts
            ],
        }


def picture(violation: Violation, bounds: Bounds) -> str:
    """The way to a violation as a sequence diagram in Mermaid; what was only to be reached violates nothing."""
    end = f"{violation.name}: {violation.text}" if violation.name != REACHED else ""
    return mermaid(violation.trace, bounds.sinks, end)


def explore(scope: Sequence[Bounds], say: Say, states_max: int = 0) -> Report:
    """Explore each of the bounds; stops after the first in which something is violated."""
    parts: list[tuple[Bounds, Result]] = []
    for bounds in scope:
        result = check(Model(bounds), lambda n, d, w: say(progress_line(n, d, w)), states_max)
        parts.append((bounds, result))
        say(f"{result.states:,} states, depth {result.depth}, {result.seconds:.1f} s: {in_words(bounds)}")
        if result.violations:
            break
    return Report(tuple(parts))


def progress_line(states: int, depth: int, waiting: int) -> str:
    return f"  {states:,} states so far, {depth} steps deep, {waiting:,} on this level"


def in_words(bounds: Bounds) -> str:
    """The bounds in one line; what is not there is not told."""
    values = asdict(bounds)
    sinks = "+".join(values.pop("sinks"))
    told = [f"{name} {int(value)}" for name, value in values.items() if value]
    return f"{sinks}, {', '.join(told)}".replace("_", " ")


def hunts_as_json(hunts: Sequence[Hunt]) -> dict[str, Any]:
    return {
        "mutants": len(hunts),
        "caught": sum(bool(h.caught_by) for h in hunts),
        "missed": [h.mutant.name for h in hunts if not h.caught_by],
        "seconds": round(sum(h.result.seconds for h in hunts), 3),
        "hunts": [
            {
                "name": h.mutant.name,
                "what": h.mutant.what,
                "caught_by": h.caught_by,
                "steps": h.result.depth,
                "states": h.result.states,
                "bounds": in_words(h.mutant.bounds),
            }
            for h in hunts
        ],
    }
