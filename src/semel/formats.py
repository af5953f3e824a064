"""The numbers of the formats in which semel leaves things behind: the only place that gives them.

A number is raised when a semel of the release before would misread what is written, and not when it would only leave
something unread. So stores that several pipelines share can be upgraded one pipeline after the other. What carries no
number was written by 0.1.0, and has the number 1.

What tasks have staged is read by way of the committable that names it, under the committable's number, and dropped by
its name alone.
"""

from __future__ import annotations

from semel.errors import NewerRecord

#: Before there were numbers.
FIRST = 1

#: A committable inside a decision, and with it the payload of the sink and the staged parts that it names.
COMMITTABLE = 1
#: What a task returns to the driver. Both must be of one release, so an older number is not read either.
TASK = 1
#: Manifests of the Files sink.
MANIFEST = 1
#: Rows of `semel_ledger` in a SQL database, SQLite included: the column `format`.
LEDGER = 1
#: Requests of MySql's `dedup` that wait in `semel_due_...`, for days, to delete what they have inserted.
REQUESTS = 1
#: Markers and fences in Kafka's control topic. It is shared: a newer record of another pipeline is passed over.
CONTROL_TOPIC = 1


def is_newer(found: object, known: int) -> bool:
    """A number that is none was written by a semel that counts in another way: by a newer one."""
    return not isinstance(found, int) or found > known


def refuse_newer(what: str, found: object, known: int, *, data_now: str = "", remedy: str = "") -> None:
    """Raise NewerRecord when a number is above what this release reads. `what` names the record and its sink."""
    if is_newer(found, known):
        told = f"{what} has format {found}; this semel reads up to {known}."
        raise NewerRecord(told, data_now=data_now, remedy=remedy)
