"""Names: what is spelled is parsed back, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch, pipeline_id, sink_name, to_sink_name

PIPELINE = "0f9a1c9e-0000-4000-8000-00000000000a"
BRANCH = Branch(Attempt(PipelineId(PIPELINE), 42, 1, Incarnation(3)), "orders", 7, 0)
NAME = f"semel-{PIPELINE}-orders-b42-a1-i3-t7-r0"

numbers = st.integers(0, 2**63)
sink_names = st.from_regex(r"[a-z][a-z0-9_]{0,39}", fullmatch=True)
attempts = st.builds(Attempt, st.uuids().map(lambda u: PipelineId(str(u))), numbers, numbers, numbers.map(Incarnation))
branches = st.builds(Branch, attempts, sink_names, numbers, numbers)


def test_a_branch_is_spelled_like_this() -> None:
    assert str(BRANCH) == NAME
    assert parse_branch(NAME) == BRANCH


@given(branches)
def test_every_branch_is_parsed_back(branch: Branch) -> None:
    assert parse_branch(str(branch)) == branch


@given(branches, branches)
def test_different_branches_have_different_names(one: Branch, other: Branch) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "semel",
        NAME + " ",
        NAME + "\n",
        "x" + NAME,
        NAME.upper(),
        NAME.replace("-r0", ""),
        NAME.replace("-b42", "-b-42"),
        NAME.replace("-b42", "-b042"),
        NAME.replace("-b42", "-b٤٢"),
        NAME.replace("orders", "9orders"),
        NAME.replace("orders", ""),
        NAME.replace(PIPELINE, PIPELINE[:-1]),
    ],
)
def test_a_name_that_we_never_spell_is_not_ours(name: str) -> None:
    assert parse_branch(name) is None


@given(st.text())
def test_no_text_is_parsed_as_a_branch_that_is_spelled_otherwise(text: str) -> None:
    branch = parse_branch(f"semel-{PIPELINE}-{text}")
    assert branch is None or str(branch) == f"semel-{PIPELINE}-{text}"


def test_an_attempt_says_what_a_person_needs() -> None:
    assert str(BRANCH.attempt) == "batch 42 attempt 1 (incarnation 3)"


def test_attempts_sort_by_batch_then_attempt() -> None:
    a = [Attempt(PipelineId(PIPELINE), batch, slot, Incarnation(1)) for batch in (2, 10) for slot in (2, 10)]
    assert sorted([a[3], a[1], a[0], a[2]]) == a


@given(st.uuids())
def test_a_query_id_of_spark_is_a_pipeline_id(uuid: object) -> None:
    assert pipeline_id(str(uuid)) == str(uuid)


@pytest.mark.parametrize(
    "text", ["", "orders", PIPELINE.upper(), PIPELINE + "\n", PIPELINE.replace("-", ""), "../" + PIPELINE]
)
def test_other_text_is_no_pipeline_id(text: str) -> None:
    with pytest.raises(ValueError, match="not a Spark query id") as raised:
        pipeline_id(text)
    assert repr(text) in str(raised.value)


@given(sink_names)
def test_a_good_sink_name_is_kept(name: str) -> None:
    assert (sink_name(name), to_sink_name(name)) == (name, name)


@pytest.mark.parametrize(
    "text", ["", "Orders", "9orders", "_orders", "or-ders", "or ders", "o" * 41, "orders\n", "ordérs"]
)
def test_a_bad_sink_name_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="use a-z, 0-9 and _, a letter first, at most 40 characters"):
        sink_name(text)


@given(st.text())
def test_any_text_can_be_made_a_sink_name(text: str) -> None:
    made = to_sink_name(text)
    assert sink_name(made) == made
    assert to_sink_name(made) == made
