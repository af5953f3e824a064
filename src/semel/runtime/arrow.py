"""How many bytes Spark may put into one Arrow batch on its way to Python.

From 4.0 on Spark asks for every row how large the batch has become (`spark.sql.execution.arrow.maxBytesPerBatch`), and
the answer takes an eighth of all that the JVM does for the row. Where rows are small the limit on their number, 10,000
by default, is met long before, so that nothing is won by asking. It is lifted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
#: What Spark takes for "no limit": it does not look then.
NO_LIMIT = str(2**31 - 1)
SMALL_ROW_BYTES = 4_096


@dataclass
class ArrowLimit:
    """Of one query. Its first batch has Spark's own limit, and so has every batch after one with large rows.

    Should rows grow all of a sudden, one batch of 10,000 of them may need much memory; the next start is careful again.
    """

    lifted: bool = False
    row_bytes: int = 2**62

    def saw(self, row_bytes: int) -> None:
        """The rows of the batch before."""
        self.row_bytes = row_bytes

    def apply(self, session: Any) -> None:
        """To the session of the query, which is a copy of the user's. What the user has set stays."""
        wanted = self.row_bytes <= SMALL_ROW_BYTES
        if wanted and not self.lifted and session.conf.get(SETTING, None) is None:
            session.conf.set(SETTING, NO_LIMIT)
            self.lifted = True
        elif self.lifted and not wanted:
            session.conf.unset(SETTING)
            self.lifted = False
