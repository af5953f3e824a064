"""Everything that semel raises.

    SemelError
    ├── ConfigError              the pipeline as written cannot run; nothing was started
    │   ├── Refused              an option, trigger or source that breaks the guarantee
    │   ├── SchemaMismatch       the rows do not fit the sink
    │   └── MissingExtra         a client library is not installed
    ├── CheckpointError          the checkpoint and this pipeline do not belong together; nothing was started
    │   ├── CheckpointUnusable   it cannot be read or written
    │   ├── AnotherPipeline      it belongs to another pipeline
    │   ├── CheckpointRolledBack a sink knows batches that the checkpoint does not
    │   ├── PlanChanged          it says of a decided batch something else than was decided
    │   ├── CorruptRecord        a record is damaged
    │   └── NewerRecord          a record was written by a newer semel
    ├── SourceUnavailable        retryable: the input cannot be reached
    ├── SinkUnavailable          retryable: a store did not let us in
    ├── BatchFailed              retryable: rolled back, nothing of the batch is visible
    ├── CommitStalled            retryable: decided, a sink has yet to commit; the next start completes it
    ├── DecisionUnknown          retryable: the log did not answer; the next start settles it
    ├── PlanRestored             retryable: Spark runs another plan than the checkpoint has; the next start reads it
    ├── QueryStopped             the query is being stopped between two batches
    ├── Fenced                   fatal: a newer incarnation runs this pipeline
    ├── RowsGone                 needs a person: decided, and a replay does not bring what is gone from a sink
    └── InDoubt                  needs a person: a sink cannot say what happened

An error has three lines: what failed, what is true of the data now, what to do next.
"""

from __future__ import annotations

import errno

#: What a file system goes on saying until somebody changes something. A folder that is not there is not among them: it
#: may be a mount that comes back. Nor are EIO and ENOSPC, which end when a disk or a person does something elsewhere.
LASTING_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)


def lasts(error: OSError) -> bool:
    """Whether it makes no sense to try again before somebody has changed a right, a path or a mount."""
    return isinstance(error, PermissionError) or error.errno in LASTING_ERRNOS


class SemelError(Exception):
    """Base of all errors. Subclasses give the second and third line unless the raiser knows better."""

    data_now = "not known"
    remedy = "Please report this as a bug of semel."

    def __init__(self, what: str, *, data_now: str = "", remedy: str = "") -> None:
        self.what = what
        self.data_now = data_now or self.data_now
        self.remedy = remedy or self.remedy
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.what}\n  the data now: {self.data_now}\n  what to do: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.data_now, self.remedy)


def _rebuild(kind: type[SemelError], what: str, data_now: str, remedy: str) -> SemelError:
    return kind(what, data_now=data_now, remedy=remedy)


class ConfigError(SemelError):
    data_now = "nothing was started and no row was written"
    remedy = "Correct the pipeline and start it again."


class Refused(ConfigError):
    pass


class SchemaMismatch(ConfigError):
    remedy = "Select or cast the columns so that they match the sink, or name another table or folder."


class MissingExtra(ConfigError):
    def __init__(self, what: str, *, data_now: str = "", remedy: str = "", extra: str = "") -> None:
        super().__init__(what, data_now=data_now, remedy=remedy or f"Install it: pip install 'semel[{extra}]'")


class CheckpointError(SemelError):
    data_now = "this start wrote nothing; what was visible before still is"


class CheckpointUnusable(CheckpointError):
    remedy = "Name a checkpointLocation that this user can read and write."


class AnotherPipeline(CheckpointError):
    remedy = "Give this pipeline a checkpointLocation of its own."


class CheckpointRolledBack(CheckpointError):
    remedy = "Restore the newest checkpoint folder. If it is lost, a person must decide what to do with the rows above."


class PlanChanged(CheckpointError):
    data_now = "the rows that were decided are visible or will be; rows between the two plans may be in no sink"
    remedy = (
        "Restore the checkpoint folder from a copy of one moment. If there is none, write the rows between the two "
        "offsets by hand."
    )


class CorruptRecord(CheckpointError):
    remedy = "Restore the file from a copy of the checkpoint. Do not delete it: it may hold the decision of a batch."


class NewerRecord(CheckpointError):
    remedy = "Run this pipeline with the newer semel that wrote the record."


class SourceUnavailable(SemelError):
    data_now = "nothing was started and no row was written"
    remedy = "Bring the source back, or correct its address, and start the pipeline again."


class SinkUnavailable(SemelError):
    data_now = "nothing was changed by this call"
    remedy = "Bring the store back, or end what holds it, and start the pipeline again."


class BatchFailed(SemelError):
    data_now = "the batch was rolled back: nothing of it is visible in any sink"
    remedy = "Mend the cause and start the pipeline again: the batch runs again from the same offsets."


class CommitStalled(SemelError):
    remedy = "Bring the sink back and start the pipeline again: it commits what is left and runs nothing twice."


class DecisionUnknown(SemelError):
    data_now = "nothing of the batch is visible; whether it was decided is not known yet"
    remedy = "Start the pipeline again: it reads the log, then commits the batch or rolls it back."


class PlanRestored(SemelError):
    data_now = "this start wrote no rows; the checkpoint says again what was decided"
    remedy = "Start the pipeline again: it commits the batch that was decided and goes on behind it."


class QueryStopped(SemelError):
    data_now = "nothing of the batch was written"
    remedy = "Start the pipeline again when you like: the batch runs from the same offsets."


class Fenced(SemelError):
    data_now = "this driver made nothing of its last batch visible; the newer one goes on from there"
    remedy = "Leave this one stopped. Run a pipeline in one place only."


class RowsGone(SemelError):
    data_now = "the batch is decided; what is named here is not visible, the rest is"
    remedy = "Write the missing rows by hand from the offsets of the batch."


class InDoubt(SemelError):
    remedy = "Look at the sink by hand, then resolve the named transactions."
