"""`semel model`: what it prints and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from semel import cli
from semel.model import mutants as mutants_module
from semel.model.adversary import Model
from semel.model.mutants import MUTANTS, Mutant

Semel = Callable[..., tuple[int, str, str]]
CALM = (
    "--sinks",
    "prepared",
    *(f"--bound={name}=0" for name in ("crashes", "zombies", "lost", "expiries", "restarts")),
)


@pytest.fixture
def semel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Semel:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["semel", "model", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_check_as_json(semel: Semel) -> None:
    code, out, err = semel("check", *CALM, "--bound=batches=1", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"states", "depth", "violations", "properties", "seconds", "bounds", "verdict"} <= set(found)
    assert (found["states"], found["depth"], found["violations"], found["verdict"]) == (17, 16, [], "true")
    assert set(found["properties"]["always"].values()) == {"holds"}
    assert found["properties"]["never"] == []
    assert found["bounds"][0]["sinks"] == ["prepared"]
    assert "17 states" in err


def test_check_in_words(semel: Semel) -> None:
    code, out, _ = semel("check", *CALM)
    assert code == 0
    assert "holds     no_duplicate: no row is ever visible twice" in out
    assert out.splitlines()[-1].startswith("verdict true: 25 states in ")


def test_a_violation_ends_with_1_and_the_shortest_way(semel: Semel, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == "checkpoint_when_decided"]
    monkeypatch.setattr("semel.model.report.Model", mutant.make)
    code, out, _ = semel("check", *CALM, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (1, "false")
    assert found["violations"][0]["property"] == "no_loss"
    assert found["properties"]["always"]["no_loss"] == "violated"
    assert found["properties"]["always"]["no_torn"] == "unknown"
    assert found["violations"][0]["trace"][-1] == "11  driver 1 decides batch 0 in slot 0"
    code, out, _ = semel("check", *CALM)
    assert code == 1
    assert out.splitlines()[-1] == "no_loss: sink s0: (0, 0) is missing 1 time(s)"


def test_a_violation_comes_with_a_picture(semel: Semel, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == "checkpoint_when_decided"]
    monkeypatch.setattr("semel.model.report.Model", mutant.make)
    code, out, _ = semel("check", *CALM, "--mermaid")
    assert code == 1
    picture = out[out.index("sequenceDiagram") :].splitlines()
    assert "    participant s0 as s0 (prepared)" in picture
    assert "    d1->>log: decides batch 0 in slot 0" in picture
    assert picture[-1].endswith("VIOLATED no_loss: sink s0: (0, 0) is missing 1 time(s)")
    _, out, _ = semel("check", *CALM, "--json")
    assert json.loads(out)["violations"][0]["mermaid"].splitlines() == picture


def test_a_search_that_was_cut_is_not_a_pass(semel: Semel) -> None:
    code, out, _ = semel("check", *CALM, "--states-max", "5", "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (1, "unknown")
    assert set(found["properties"]["always"].values()) == {"unknown"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "--scope", "huge"), "There is no scope 'huge'."),
        (("check", "--sinks", "tape"), "not tape"),
        (("check", "--sinks", ""), "sinks are 1 to 3"),
        (("check", "--bound", "crashes=4"), "crashes is 0 to 3, not 4"),
        (("check", "--bound", "crashes"), "--bound crashes is not NAME=NUMBER"),
        (("check", "--bound", "moods=1"), "--bound moods=1 is not NAME=NUMBER"),
        (("check", "--bound", "batches=0"), "batches is 1 to 4, not 0"),
        (("check", "--states-max", "-1"), "greater than or equal to 0"),
        (("trace", "nix"), "There is no mutant 'nix'."),
        (("mutants", "nix"), "There is no mutant 'nix'."),
    ],
)
def test_bad_input_ends_with_2(semel: Semel, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = semel(*arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_mutants_as_json(semel: Semel) -> None:
    code, out, _ = semel("mutants", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["mutants"], found["caught"], found["missed"]) == (len(MUTANTS), len(MUTANTS), [])
    assert {"name", "what", "caught_by", "steps", "states", "bounds"} == set(found["hunts"][0])


def test_a_mutant_that_is_missed_ends_with_1(semel: Semel, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless: Mutant = replace(MUTANTS[0], name="harmless", make=Model)
    monkeypatch.setattr("semel.cli.model.MUTANTS", (harmless,))
    monkeypatch.setattr(mutants_module, "MUTANTS", (harmless,))
    code, out, _ = semel("mutants", "--json")
    assert (code, json.loads(out)["missed"]) == (1, ["harmless"])
    assert semel("trace", "harmless")[:2] == (1, "There is no way to harmless.\n")


def test_the_way_of_a_mutant_in_words_as_a_picture_and_as_json(semel: Semel) -> None:
    code, out, _ = semel("trace", "retry_is_done")
    assert code == 0
    assert out.splitlines()[-1] == "no_loss: sink s0: (0, 0) is missing 1 time(s)"
    code, out, _ = semel("trace", "retry_is_done", "--mermaid")
    assert (code, out.splitlines()[0]) == (0, "sequenceDiagram")
    assert "VIOLATED no_loss" in out
    code, out, _ = semel("trace", "retry_is_done", "--json")
    found = json.loads(out)
    assert (code, found["property"], found["steps"]) == (0, "no_loss", len(found["trace"]))


def test_the_way_to_a_step_of_the_unchanged_protocol(semel: Semel) -> None:
    code, out, _ = semel("trace", "expire")
    assert code == 0
    assert "FAULT: in sink s0 a prepared branch expires" in out
    assert out.splitlines()[-1] == "reached: expire"
