"""The page shows what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.protocol.diagram import BEGIN, END, document, main, mermaid, refreshed
from semel.protocol.states import EVENT_TRIGGERED, State

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
REFRESH = "python -m semel.protocol.diagram --write docs/protocol.md"


def test_the_page_holds_exactly_what_the_tables_generate() -> None:
    page = PAGE.read_text(encoding="utf-8")
    between = page.partition(BEGIN)[2].partition(END)[0]
    assert between == document(), f"docs/protocol.md is out of date; refresh it: {REFRESH}"


def test_the_page_says_how_to_refresh_it() -> None:
    assert REFRESH in PAGE.read_text(encoding="utf-8")


def test_the_diagram_shows_every_state_and_every_move() -> None:
    drawn = mermaid()
    assert [state.name for state in State if state.name not in drawn] == []
    moves = [(s, e, t) for s, row in EVENT_TRIGGERED.items() for e, t in row.items() if s is not t]
    assert len(moves) == 11
    assert [move for move in moves if f"{move[0].name} --> {move[2].name}: {move[1].__name__}" not in drawn] == []


def test_write_replaces_only_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    assert main(["--write", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}{document()}{END}after\n"


@pytest.mark.parametrize("page", ["", BEGIN, END, END + BEGIN, BEGIN + BEGIN + END])
def test_a_page_without_its_two_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="generated: begin"):
        refreshed(page)


def test_without_arguments_the_generated_part_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == document()


def test_other_arguments_are_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 2
    assert capsys.readouterr().err == "usage: python -m semel.protocol.diagram [--write PAGE]\n"
