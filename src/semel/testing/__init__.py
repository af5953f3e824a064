"""For authors of sinks: the contract that every sink keeps, as tests. It needs pytest, as nothing else of semel does.

contract         the suite: `from semel.testing.contract import *`
fixtures         makes its fixtures of a harness of yours
harness          what a harness tells of its store, and what the suite does with a sink
fresh_process    the other process, which commits what it has never seen
"""

import pytest

# Before they are imported, so that an assertion that fails tells what was there instead.
pytest.register_assert_rewrite("semel.testing.contract", "semel.testing.harness")
