"""The commit protocol. Pure: no clock, no I/O, no pyspark, standard library only.

Theory of operation
===================

Spark runs a micro-batch in three strides: it writes `offsets/N`, calls our function with the rows of batch N, and
writes `commits/N` once the function returns. A batch without its `commits/N` is run again with the same number and the
same offsets. So a batch is one global transaction: the driver coordinates, every sink takes part, and what one task
wrote for one sink is a branch.

**The batch.** `states.py` holds the whole life of a batch as three tables: which event moves which state where, what
follows once every committable has answered, and what a coordinator does in each state. `step.py` looks them up. The
runtime performs the actions and reports events; the model checker does the same in a world of its own. Neither knows a
rule that is not in the tables.

    OPEN      tasks write, sinks prepare: durable, invisible                        crash: rolled back, run again
    PREPARED  every sink has promised; the decision is being recorded               crash: rolled back, run again
    DECIDED   the decision is durable; sinks commit, in parallel, in any order      crash: committed forward
    BROKEN    a branch is *proven* gone; its rows are written again                 crash: found broken again
    MENDED    they are prepared again; the new committables are being recorded      crash: found broken again
    COMMITTED all sinks answered; Spark may write commits/N                         crash: all answer "already"

**The journal.** The decision log keeps one short journal per batch: numbered slots, each created if absent, never
changed. Attempt a of a batch may be decided only in slot a. A decision is durable when its slot exists and not before;
whoever creates the slot first wins, and everybody else reads what was decided.

    slot 0  Aborted    incarnation 2 closed what incarnation 1 left undecided
    slot 1  Decided    incarnation 2 decided, with every committable inside
    slot 2  Decided    (mends) one committable was proven gone and has been replaced

**What it was taken for.** A decision carries the plan of its batch, because Spark does not sync what it plans, and a
checkpoint may be a copy. `plans.py` says what follows when the checkpoint and the decision differ: a batch is finished
over the rows that it was decided for, or not at all. `refusals.py` says when a start is refused, `order.py` in which
order sinks promise and commit.

**Presumed abort, made explicit when it matters.** A crash before the decision leaves an empty slot. Every start closes
the next empty slot of the batch it finds before it touches any branch. A zombie driver that wakes up and tries to
decide finds the slot taken and stands down: it can never decide in favour of branches that were rolled back. It rolls
back its own on the way out: its slot is somebody else's, so no decision will ever name them, and in some stores they
would hold up readers. A driver that finds a newer claim *after* its decision leaves everything as it is, because the
newer one commits it.

**Two drivers.** Each start claims the next incarnation, create-if-absent. A driver reads the journal *first* and looks
for a newer claim *second*. If it saw the slot closed, it also sees the claim that closed it; if it did not see the slot
closed, it goes for that very slot and loses. So there is no moment at which two drivers can both decide a batch. It
looks for a newer claim once more between the decision and the commits, because journals of old batches are pruned: a
driver that slept through the pruning finds its slot empty again, and must not act on what it records there.

**Unknown is not success.** A sink answers a commit with one of five outcomes. "Gone" needs proof by the marker that
every store carries in the same transaction as the data. "Retry" keeps the batch decided. "In doubt" stops the pipeline
and asks a person. When the log itself does not answer, the driver touches nothing: the next start settles the slot.
"""
