"""Named sets of bounds. Each is explored on its own; together they must meet everything that is to be met sometimes."""

from __future__ import annotations

from semel.model.world import KINDS, Bounds

#: Every build: a few seconds.
SMALL = (
    Bounds(KINDS, batches=2, crashes=1, zombies=0, lost=0, expiries=1, restarts=1),
    Bounds(("prepared", "ledger"), batches=1, crashes=1, zombies=0, lost=1, restarts=0, expiries=0, doubts=1),
    Bounds(("prepared",), batches=1, tasks=2, crashes=1, zombies=0, lost=0, expiries=2, restarts=0, retries=1),
    Bounds(("prepared",), batches=2, crashes=0, zombies=1, lost=0, expiries=1, restarts=0),
    Bounds(("idempotent",), batches=1, crashes=0, zombies=2, lost=0, expiries=0, restarts=0, weaker_before=True),
    Bounds(("prepared", "ledger"), batches=2, crashes=1, zombies=0, lost=0, expiries=1, restarts=0, away=1),
    Bounds(("ledger",), batches=2, crashes=1, zombies=0, lost=0, expiries=0, restarts=0, forgets=1),
    Bounds(("idempotent",), batches=2, crashes=1, zombies=0, lost=0, expiries=0, restarts=0, forgets=1, drop_in=True),
    Bounds(("idempotent",), batches=2, crashes=0, zombies=1, lost=0, expiries=0, restarts=0, forgets=1),
    Bounds(("idempotent",), 2, crashes=0, zombies=1, lost=0, expiries=0, restarts=0, forgets=1, drop_in=True),
    Bounds(("idempotent",), 2, crashes=2, zombies=0, lost=0, expiries=0, restarts=0, forgets=1, drop_in=True, strays=1),
)

#: The proof: minutes. Each line leaves out some fault, so that the others may come more often or together.
FULL = (
    Bounds(KINDS, batches=2, crashes=1, zombies=1, lost=1, expiries=0, restarts=0),
    Bounds(KINDS, batches=2, crashes=1, zombies=0, lost=1, expiries=1, restarts=1),
    Bounds(KINDS, batches=2, crashes=0, zombies=1, lost=0, expiries=1, restarts=1, retries=1),
    Bounds(KINDS, batches=2, crashes=3, zombies=0, lost=0, expiries=0, restarts=0),
    Bounds(("prepared", "ledger"), batches=2, crashes=2, zombies=0, lost=0, expiries=0, restarts=1, doubts=1),
    Bounds(("prepared",), batches=1, tasks=2, crashes=1, zombies=1, lost=1, expiries=1, restarts=0),
    Bounds(("prepared", "idempotent"), batches=3, crashes=1, zombies=1, lost=0, expiries=0, restarts=0),
    Bounds(("idempotent",), batches=1, crashes=1, zombies=2, lost=0, expiries=0, restarts=0, weaker_before=True),
    Bounds(KINDS, batches=2, crashes=1, zombies=0, lost=0, expiries=1, restarts=1, away=2),
    Bounds(KINDS, batches=2, crashes=1, zombies=0, lost=0, expiries=1, restarts=0, forgets=1),
    Bounds(("prepared", "ledger"), batches=2, crashes=1, zombies=0, lost=1, expiries=0, restarts=0, forgets=1),
    Bounds(("ledger",), batches=2, crashes=1, zombies=1, lost=0, expiries=0, restarts=0, forgets=1, drop_in=True),
    Bounds(("idempotent",), batches=3, crashes=1, zombies=0, lost=0, expiries=0, restarts=0, forgets=2, drop_in=True),
    Bounds(("ledger",), 3, crashes=2, zombies=0, lost=0, expiries=0, restarts=0, forgets=1, drop_in=True, strays=1),
)

SCOPES = {"small": SMALL, "full": FULL}
