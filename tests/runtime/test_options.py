"""The options of a writer that are semel's own."""

from __future__ import annotations

import pytest

from semel.errors import ConfigError
from semel.runtime.options import NAMES, POWER_LOSS_SAFE, TUNED_WORKERS, Switches, check_names


@pytest.mark.parametrize(("said", "on"), [("TRUE", True), ("true", True), (False, False), ("False", False)])
def test_a_switch_is_on_unless_it_is_turned_off(said: object, on: bool) -> None:
    assert Switches.said_by({}) == Switches(power_loss_safe=True, tuned_workers=True)
    assert Switches.said_by({POWER_LOSS_SAFE: said}) == Switches(power_loss_safe=on, tuned_workers=True)
    assert Switches.said_by({TUNED_WORKERS: said}) == Switches(power_loss_safe=True, tuned_workers=on)


def test_what_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"semel\.powerLossSafe is 'maybe'") as caught:
        Switches.said_by({POWER_LOSS_SAFE: "Maybe"})
    assert caught.value.remedy == "Set semel.powerLossSafe to true, which is the default, or to false."


@pytest.mark.parametrize(
    ("name", "meant"), [("semel.powerlosssafe", POWER_LOSS_SAFE), ("Semel.tunedWorker", TUNED_WORKERS)]
)
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(["checkpointLocation", name])
    assert (caught.value.what, caught.value.remedy) == (f"semel knows no option {name}.", f"Did you mean {meant}?")
    check_names(["checkpointLocation", "maxFilesPerTrigger", *NAMES])
