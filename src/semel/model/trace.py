"""A way through the model in words, and as a sequence diagram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from semel.model.observer import words
from semel.model.world import Label


class Verb(NamedTuple):
    """How a step is told. The numbers in braces are its arguments; `whom` is who hears of it in the diagram."""

    text: str
    whom: str = ""


VERBS = {
    "start": Verb("a driver is started; Spark's next batch is {0}"),
    "second_driver": Verb("FAULT: the driver is taken for dead and another is started; Spark's next batch is {0}"),
    "start_in_batch": Verb("Spark starts, and calls a driver in the middle of a batch; its next batch is {0}"),
    "plan": Verb("driver {0}: Spark plans batch {1} over all rows there are: plan {2}", "spark"),
    "second_in_batch": Verb("FAULT: the driver is taken for dead and Spark starts another; its next batch is {0}"),
    "open": Verb("driver {0}: Spark looks where to go on: batch {1}, which is not planned", "spark"),
    "idle": Verb("driver {0}: Spark finds all batches done", "spark"),
    "overtaken": Verb("the driver finds that somebody has ended batch {0}, which it has in hand, and claims nothing"),
    "begins_elsewhere": Verb("driver {0}: Spark begins batch {1} behind another plan than was decided, and it stops"),
    "runs_behind": Verb("driver {0}: Spark runs batch {1}, which is over; the checkpoint has lost plans, and it stops"),
    "drop": Verb("driver {0} drops the plan of batch {1}, which was made behind another plan", "spark"),
    "stray": Verb("FAULT: somebody runs batch {0} past us over plan {1} and ends it"),
    "stray_decides": Verb("FAULT: driver {0}, which compares no plans, decides and ends batch {1} over plan {2}"),
    "plan_read": Verb("driver {0}: Spark finds batch {1} planned: plan {2}", "spark"),
    "plan_taken": Verb("driver {0}: batch {1} is planned by somebody else; Spark stops the query", "spark"),
    "plan_missing": Verb("driver {0}: the plan of batch {1} is missing; Spark stops the query", "spark"),
    "restore": Verb("driver {0} compares the plan of batch {1} with its decision: {2}", "spark"),
    "restarted": Verb("driver {0} has put the plan back that was decided; Spark has rows of another, and it stops"),
    "restored": Verb("driver {0} finds in the checkpoint what was decided", "spark"),
    "forget": Verb("FAULT: the checkpoint loses the plan of batch {0}"),
    "forget_commit": Verb("FAULT: the checkpoint loses commits/{0}"),
    "forget_batch": Verb("FAULT: the checkpoint loses commits/{0} and what is newer"),
    "forget_done": Verb("FAULT: the checkpoint loses the plan of batch {0}, which is done, and what is newer"),
    "forget_both": Verb("FAULT: the checkpoint loses commits/{0}, its plan and what is newer"),
    "claim": Verb("driver {0} claims the pipeline", "log"),
    "list": Verb("driver {0} lists the stores and finds {1} branch(es)", "stores"),
    "fence": Verb("driver {0} fences sink s{1}", "s{1}"),
    "fence_refused": Verb("driver {0} is refused by sink s{1}, which knows a newer one, and stops", "s{1}"),
    "read": Verb("driver {0} reads the journal of batch {1}: {2} slot(s)", "log"),
    "close": Verb("driver {0} closes slot {2} of batch {1}", "log"),
    "close_taken": Verb("driver {0} finds slot {2} of batch {1} taken and reads again", "log"),
    "close_unanswered": Verb("FAULT: driver {0} closes slot {2} of batch {1}, the answer is lost, it stops", "log"),
    "close_late": Verb("FAULT: driver {0} asks to close slot {2} of batch {1}, the request is late, it stops", "log"),
    "start_refused": Verb("driver {0} finds a store that is ahead of batch {1} and refuses to start", "log"),
    "sweep": Verb("driver {0} sweeps sink s{1}: {2} branch(es) dropped", "s{1}"),
    "resolve": Verb("driver {0} looks for a newer claim; batch {1} resolves to {2}", "log"),
    "stage": Verb("driver {0} stages batch {1} attempt {2} in sink s{3}", "s{3}"),
    "stage_retried": Verb(
        "FAULT: driver {0} stages batch {1} attempt {2} in sink s{3}; task 0 is lost and runs twice", "s{3}"
    ),
    "prepare": Verb("driver {0}: sink s{2} prepares batch {1}", "s{2}"),
    "prepare_failed": Verb("driver {0}: sink s{2} cannot prepare batch {1}", "s{2}"),
    "prepare_away": Verb("FAULT: driver {0}: the store of sink s{2} is away and does not prepare batch {1}", "s{2}"),
    "prepare_unanswered": Verb("FAULT: driver {0}: sink s{2} prepares batch {1} and the answer is lost", "s{2}"),
    "decide": Verb("driver {0} decides batch {1} in slot {2}", "log"),
    "decide_refused": Verb("driver {0} finds slot {2} of batch {1} taken", "log"),
    "decide_unanswered": Verb("FAULT: driver {0} decides batch {1} in slot {2} and the answer is lost", "log"),
    "decide_late": Verb("FAULT: driver {0} asks to decide batch {1} in slot {2}; the request is late", "log"),
    "look": Verb("driver {0} looks for a newer claim and finds none", "log"),
    "fenced": Verb("driver {0} finds a newer claim after its decision of batch {1}", "log"),
    "commit": Verb("driver {0} commits {2} of batch {1}: {3}", "{2}"),
    "commit_unanswered": Verb("FAULT: driver {0} commits {2} of batch {1} and the answer is lost", "{2}"),
    "commit_given_up": Verb("FAULT: driver {0} commits {2} of batch {1}, the answer is lost, it gives up", "{2}"),
    "commit_late": Verb("FAULT: driver {0} sends the commit of {2} of batch {1}; it is late", "{2}"),
    "commit_late_given_up": Verb("FAULT: driver {0} sends the commit of {2} of batch {1}; late, it gives up", "{2}"),
    "commit_in_doubt": Verb("FAULT: driver {0} commits {2} of batch {1}, and the store cannot tell", "{2}"),
    "roll_back": Verb("driver {0} rolls batch {1} back and stops", "stores"),
    "withdraw": Verb("driver {0} drops its branches of batch {1} and stands down", "stores"),
    "prune": Verb("driver {0} forgets the journals before batch {1}", "log"),
    "tidy": Verb("driver {0} drops what lost tries left", "stores"),
    "checkpoint": Verb("driver {0}: Spark writes commits/{1}", "spark"),
    "checkpoint_taken": Verb("driver {0}: commits/{1} is there already; Spark stops the query", "spark"),
    "crash": Verb("FAULT: driver {0} crashes"),
    "crash_without_tasks": Verb("FAULT: driver {0} crashes while its tasks go on"),
    "tasks_arrive": Verb("LATE: tasks of driver {0} stage in sink s{1}; nobody waits for them"),
    "expire": Verb("FAULT: in sink s{0} a prepared branch expires: {1}"),
    "restart": Verb("FAULT: the store of sink s{0} restarts and forgets its open transaction"),
    "commit_arrives": Verb("LATE: the commit of {1} of batch {2} that driver {0} sent takes effect"),
    "slot_arrives": Verb("LATE: what driver {0} sent for slot {2} of batch {1} reaches the log"),
    "weaker_before": Verb("the checkpoint comes from a run at-most-once that began batch 0"),
    "protocol_error": Verb("driver {0} does what the protocol does not know"),
    "stuck": Verb("no driver gets further"),
}


def sentence(label: Label) -> str:
    verb, *arguments = label
    if verb == "expire":
        arguments[1] = words(int(arguments[1]))
    return VERBS[str(verb)].text.format(*arguments)


def numbered(trace: Sequence[Label]) -> list[str]:
    """One line a step."""
    width = len(str(len(trace)))
    return [f"{number:>{width}}  {sentence(label)}" for number, label in enumerate(trace, 1)]


def mermaid(trace: Iterable[Label], sinks: Sequence[str], end: str = "") -> str:
    """A sequence diagram: drivers on the left, the log, Spark and the stores on the right, faults as notes."""
    trace = list(trace)
    drivers = sorted({int(label[1]) for label in trace if label[0] == "claim"})
    lines = ["sequenceDiagram", *(f"    participant d{n} as driver {n}" for n in drivers)]
    lines += ["    participant log as decision log", "    participant spark as Spark"]
    lines += [f"    participant s{index} as s{index} ({kind})" for index, kind in enumerate(sinks)]
    over = f"d{drivers[0]},s{len(sinks) - 1}" if drivers else f"log,s{len(sinks) - 1}"
    for label in trace:
        verb, text = VERBS[str(label[0])], sentence(label)
        if not verb.whom:
            lines.append(f"    Note over {over}: {text}")
            continue
        whom = verb.whom.format(*label[1:]).partition("/")[0]
        arrow = "-x" if text.startswith("FAULT") else "->>"
        lines += [f"    d{label[1]}{arrow}{one}: {_short(text)}" for one in _all(whom, len(sinks))]
    return "\n".join([*lines, *([f"    Note over {over}: VIOLATED {end}"] if end else [])]).replace(";", ",")


def _all(whom: str, sinks: int) -> list[str]:
    return [f"s{index}" for index in range(sinks)] if whom == "stores" else [whom]


def _short(text: str) -> str:
    """The arrow shows who acts."""
    return text.removeprefix("FAULT: ").split(" ", 2)[-1].removeprefix(": ")
