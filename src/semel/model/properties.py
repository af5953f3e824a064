"""What must hold in every world (ALWAYS), and what the search must have met (SOMETIMES).

A violation is a text that begins with the name of its property. Some are noticed by the observer within a step, in
`driver`, because the world after it does not show them any more; the rest are looked for here, in every world, with the
named invariants of `semel.protocol.invariants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import get_args

from semel.model.adversary import Model
from semel.model.world import Bounds, World
from semel.protocol.events import Outcome
from semel.protocol.invariants import nothing_duplicated, nothing_early, nothing_lost, nothing_torn
from semel.protocol.plans import PlanAction
from semel.protocol.recovery import Fate, Resolution
from semel.protocol.states import State

ALWAYS = {
    "no_loss": "once Spark has checkpointed a batch, every row of it is visible in every sink",
    "no_duplicate": "no row is ever visible twice",
    "nothing_early": "nothing of a batch is visible before the batch is decided",
    "no_torn": "after a recovery a batch is visible in all sinks or in none",
    "no_orphan": "after a start nothing is left that no decision names; a driver that withdraws leaves nothing",
    "one_decision": "a batch is decided once, and by no older driver after a newer one has settled it",
    "decided_is_kept": "nobody drops a branch that a decision names while its rows are not visible",
    "finishes": "once nothing goes wrong any more the pipeline finishes",
    "plan_kept": "what the checkpoint has lost of a decided batch can be put back",
    "tables": "nothing happens that the tables of the protocol do not know",
}


class Observer:
    """Looks at worlds. Most of what it looks at it has seen before, so it remembers its verdicts."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tasks = model.bounds.tasks
        self.verdict_on_rows = lru_cache(None)(self._verdict_on_rows)
        self.verdict_on_the_end = lru_cache(None)(self._verdict_on_the_end)

    def verdict(self, world: World) -> str:
        """The first property that the world violates, with what is wrong; empty when all hold."""
        if world.broken:
            return world.broken
        for sink, store in enumerate(world.stores):
            if broken := self.verdict_on_rows(store.visible, world.decided, world.commits, sink):
                return broken
        if world.drivers or not self.model.finished(world):
            return ""
        # What is on its way, and what else might go wrong, does not matter for the start that comes now.
        return self.verdict_on_the_end(world._replace(left=(0,) * len(world.left), requests=()))

    def _verdict_on_rows(self, visible: tuple[int, ...], decided: int, commits: int, sink: int) -> str:
        batches = range(self.model.bounds.batches)
        rows = [(batch, task) for batch in batches for task in range(self.tasks)]
        actual: Counter[Hashable] = Counter(dict(zip(rows, visible, strict=True)))
        shown = {batch for (batch, _), n in zip(rows, visible, strict=True) if n}
        done: Counter[Hashable] = Counter(row for row in rows if row[0] < commits)
        found = {
            "no_duplicate": nothing_duplicated(Counter(rows), actual),
            "nothing_early": nothing_early(shown, [batch for batch in batches if decided >> batch & 1]),
            "no_loss": nothing_lost(done, actual),
        }
        return next((f"{name}: sink s{sink}: {texts[0]}" for name, texts in found.items() if texts), "")

    def _verdict_on_the_end(self, world: World) -> str:
        """All batches are checkpointed and nobody runs. One more start must find everything in order."""
        for batch in range(self.model.bounds.batches):
            shown = [sum(s.visible[batch * self.tasks : (batch + 1) * self.tasks]) for s in world.stores]
            if torn := nothing_torn([(batch, self.tasks * len(shown), sum(shown))]):
                return f"no_torn: {torn[0]}"
        after = self.model.undisturbed_start(world)
        if after.broken or after.asked:
            # A person who was asked looks at everything.
            return after.broken
        left = [f"s{sink}" for sink, store in enumerate(after.stores) if store.branches or store.held]
        return f"no_orphan: after one more start something is left in {', '.join(left)}" if left else ""


# Sometimes ----------------------------------------------------------------------------------------------------------


def everything() -> set[tuple[str, str]]:
    """Every state, outcome, resolution and fate of the protocol, and every branch of recovery: (kind, name)."""
    wanted = {("state", s.name) for s in State} | {("outcome", o.name) for o in Outcome}
    wanted |= {("fate", f.name) for f in Fate} | {("resolution", r.__name__) for r in get_args(Resolution)}
    wanted |= {("plan", action.name) for action in PlanAction if action is not PlanAction.REFUSE}
    return wanted | {("step", name) for name in RECOVERY_STEPS}


def expected(bounds: Bounds) -> set[tuple[str, str]]:
    """What a search within these bounds must have met. Without a fault, what it leads to is not asked for."""
    return {entry for entry in everything() if _can_be_met(entry, bounds)}


#: The branches of recovery, as verbs of the model: each must have been taken.
RECOVERY_STEPS = (
    "close",
    "close_taken",
    "close_unanswered",
    "close_late",
    "slot_arrives",
    "commit_arrives",
    "commit_unanswered",
    "commit_given_up",
    "decide_unanswered",
    "decide_late",
    "decide_refused",
    "prepare_failed",
    "prepare_away",
    "prepare_unanswered",
    "fence_refused",
    "fenced",
    "roll_back",
    "withdraw",
    "expire",
    "restart",
    "stage_retried",
    "crash",
    "second_driver",
    "checkpoint_taken",
    "start_refused",
    "tasks_arrive",
    "plan_read",
    "plan_taken",
    "forget",
    "forget_commit",
    "forget_batch",
    "forget_both",
    "forget_done",
    "open",
    "drop",
    "overtaken",
    "second_in_batch",
    "stray",
    "stray_decides",
)

_NEEDS: dict[str, Iterable[str]] = {
    "RETRY": ["lost"],
    "STALLED": ["lost"],
    "UNKNOWN": ["lost"],
    "close_unanswered": ["lost", "a_restart"],
    "close_late": ["lost", "a_restart"],
    "slot_arrives": ["lost"],
    "commit_arrives": ["lost"],
    "commit_unanswered": ["lost"],
    "commit_given_up": ["lost"],
    "decide_unanswered": ["lost"],
    "decide_late": ["lost"],
    "GONE": ["expiry"],
    "BROKEN": ["expiry"],
    "MENDED": ["expiry"],
    "expire": ["expiry"],
    "restart": ["restarts", "ledger"],
    "stage_retried": ["retries"],
    "crash": ["crashes"],
    "IN_DOUBT": ["doubts"],
    "Unclear": ["weaker_before"],
    "ALREADY_COMMITTED": ["a_restart"],
    "CommitForward": ["a_restart"],
    "close": ["a_restart"],
    "KEEP": ["a_restart"],
    "ABORT": ["a_restart"],
    "ABORTED": ["a_failed_prepare"],
    "prepare_failed": ["a_failed_prepare"],
    "prepare_away": ["away"],
    "prepare_unanswered": ["away", "ledger"],
    "roll_back": ["a_failed_prepare"],
    "REFUSED": ["zombies"],
    "FENCED": ["zombies"],
    "StandDown": ["zombies"],
    "decide_refused": ["zombies"],
    "withdraw": ["zombies"],
    "second_driver": ["zombies"],
    "fenced": ["zombies"],
    "close_taken": ["zombies"],
    "checkpoint_taken": ["zombies"],
    "start_refused": ["zombies", "batches", "journals_pruned"],
    "tasks_arrive": ["crashes"],
    "fence_refused": ["zombies", "fences"],
}


_NEEDS |= {step: ["forgets"] for step in RECOVERY_STEPS if step.startswith("forget")}
_NEEDS |= {name: ["forgets", "a_restart"] for name in ("plan_read", "RESTORE", "GO_ON")}
_NEEDS |= {"open": ["forgets"], "drop": ["forgets", "a_restart", "batches"], "second_in_batch": ["drop_in", "zombies"]}
_NEEDS |= {"overtaken": ["drop_in", "zombies"], "stray": ["forgets", "strays"], "stray_decides": ["forgets", "strays"]}
_NEEDS |= {"plan_taken": ["forgets", "zombies", "batches"], "RESTART": ["drop_in"], "PUT_BACK": ["drop_in", "crashes"]}


def _can_be_met(entry: tuple[str, str], bounds: Bounds) -> bool:
    return all(_CAN[need](bounds) for need in _NEEDS.get(entry[1], ()))


_CAN: dict[str, Callable[[Bounds], bool]] = {
    "lost": lambda b: b.lost > 0,
    "expiry": lambda b: b.expiries > 0 and "prepared" in b.sinks,
    "restarts": lambda b: b.restarts > 0,
    "ledger": lambda b: "ledger" in b.sinks,
    "retries": lambda b: b.retries > 0,
    "crashes": lambda b: b.crashes > 0,
    "doubts": lambda b: b.doubts > 0,
    "weaker_before": lambda b: b.weaker_before,
    "zombies": lambda b: b.zombies > 0,
    "batches": lambda b: b.batches > 1,
    "a_restart": lambda b: b.crashes + b.zombies > 0,
    "away": lambda b: b.away > 0,
    "a_failed_prepare": lambda b: b.away > 0 or (b.zombies > 0 and any(kind != "idempotent" for kind in b.sinks)),
    "forgets": lambda b: b.forgets > 0,
    "strays": lambda b: b.strays > 0,
    "journals_pruned": lambda b: b.forgets == 0,
    "drop_in": lambda b: b.forgets > 0 and b.drop_in,
    "fences": lambda b: any(kind != "idempotent" for kind in b.sinks),
}
