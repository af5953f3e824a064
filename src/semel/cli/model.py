"""`semel model`."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console

from semel.errors import ConfigError
from semel.model import report
from semel.model.adversary import Model
from semel.model.checker import Violation, check, way_to_step
from semel.model.mutants import MUTANTS, Mutant, hunt
from semel.model.properties import ALWAYS
from semel.model.scopes import SCOPES
from semel.model.trace import VERBS, numbered
from semel.model.world import FAULTS, KINDS, Bounds

app = typer.Typer(help="Check the commit protocol in every order of events of a small world.", no_args_is_help=True)

SEE_HELP = "See semel model check --help."

Mermaid = Annotated[bool, typer.Option("--mermaid", help="The way as a sequence diagram in Mermaid.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Scope = Annotated[str, typer.Option(help=f"Which bounds: {', '.join(SCOPES)}. Not used when bounds are given.")]
Sinks = Annotated[str | None, typer.Option(help=f"Kinds of sinks, with commas between them: {','.join(KINDS)}.")]
Bound = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=NUMBER", help=f"How much of what, repeatable: batches, tasks, {', '.join(FAULTS)}."),
]


@app.command("check")
def check_command(
    scope: Scope = "small",
    sinks: Sinks = None,
    bound: Bound = None,
    states_max: Annotated[int, typer.Option(min=0, help="Give up after so many states; 0 means never.")] = 0,
    as_mermaid: Mermaid = False,
    json: Json = False,
) -> None:
    """Explore every order of events and report the first violation with the shortest way to it.

    Exit code 0 when every property holds and all that must be reached was reached; 1 when not, or when the search was
    cut short; 2 for wrong input.
    """
    result = report.explore(bounds_of(scope, sinks, bound or ()), told(json), states_max)
    if json:
        typer.echo(json_module.dumps(result.as_json()))
    else:
        print_report(result, as_mermaid)
    raise typer.Exit(0 if result.holds else 1)


@app.command("trace")
def trace(
    of: Annotated[str, typer.Argument(metavar="MUTANT|STEP", help="A seeded bug, or a step of the model.")],
    as_mermaid: Mermaid = False,
    json: Json = False,
) -> None:
    """Print the shortest way to the violation of a seeded bug, or to a step of the unchanged protocol, in plain words.

    `semel model mutants` lists the bugs. Exit code 0 when there is a way, 1 when there is none, 2 for an unknown name.
    """
    found, bounds = way_to(of, told(json))
    if json:
        lines = numbered(found.trace) if found else []
        keys = {"of": of, "property": found.name, "text": found.text} if found else {"of": of}
        typer.echo(json_module.dumps({**keys, "steps": len(lines), "trace": lines}))
    elif found is None:
        typer.echo(f"There is no way to {of}.")
    elif as_mermaid:
        typer.echo(report.picture(found, bounds))
    else:
        print_way(found)
    raise typer.Exit(0 if found else 1)


@app.command("mutants")
def mutants(
    name: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    json: Json = False,
) -> None:
    """Seed one bug after the other into the protocol and see whether the checker finds it.

    Exit code 0 when every one is caught, 1 when one is missed, 2 for an unknown name.
    """
    say = told(json)
    hunts = []
    for found in hunt(tuple(mutant_named(one) for one in name) if name else MUTANTS):
        hunts.append(found)
        by = f"caught by {found.caught_by} in {found.result.depth} steps" if found.caught_by else "MISSED"
        say(f"{found.mutant.name}: {by}; {found.mutant.what} ({report.in_words(found.mutant.bounds)})")
    result = report.hunts_as_json(hunts)
    if json:
        typer.echo(json_module.dumps(result))
    else:
        typer.echo(f"{result['caught']} of {result['mutants']} mutants caught in {result['seconds']:.1f} s")
    raise typer.Exit(1 if result["missed"] else 0)


def told(json: bool) -> Callable[[str], None]:
    console = Console(stderr=json)
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def bounds_of(scope: str, sinks: str | None, given: Iterable[str]) -> tuple[Bounds, ...]:
    """The scope of this name; or bounds of one's own, when anything is given."""
    values: dict[str, Any] = dict(name_and_number(item) for item in given)
    if sinks is not None:
        values["sinks"] = tuple(sinks.split(","))
    if values:
        try:
            return (Bounds(**values),)
        except ValueError as error:
            raise ConfigError(f"These bounds are none: {error}.", remedy=SEE_HELP) from None
    if scope not in SCOPES:
        raise ConfigError(f"There is no scope {scope!r}.", remedy=f"Use one of {', '.join(SCOPES)}.")
    return SCOPES[scope]


def name_and_number(item: str) -> tuple[str, int]:
    name, _, number = item.partition("=")
    if name not in ("batches", "tasks", *FAULTS) or not number.isdecimal():
        raise ConfigError(f"--bound {item} is not NAME=NUMBER with a name that is known.", remedy=SEE_HELP)
    return name, int(number)


def mutant_named(name: str) -> Mutant:
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ConfigError(f"There is no mutant {name!r}.", remedy=f"Use one of {', '.join(m.name for m in MUTANTS)}.")


def way_to(of: str, say: Callable[[str], None]) -> tuple[Violation | None, Bounds]:
    """The shortest way: to what a mutant breaks, or to a step within the small scope."""
    if of not in VERBS:
        mutant = mutant_named(of)
        result = check(mutant.make(mutant.bounds))
        return (result.violations[0] if result.violations else None), mutant.bounds
    for bounds in SCOPES["small"]:
        way = way_to_step(Model(bounds), of, lambda n, d, w: say(report.progress_line(n, d, w)))
        if way:
            return Violation(report.REACHED, of, way), bounds
    return None, SCOPES["small"][0]


def print_report(result: report.Report, as_mermaid: bool = False) -> None:
    for name, verdict in result.always().items():
        typer.echo(f"{verdict:9} {name}: {ALWAYS[name]}")
    typer.echo(f"reached   {len(result.reached())} states, outcomes, resolutions, fates and branches of recovery")
    for name in result.missing():
        typer.echo(f"NEVER     {name}")
    typer.echo(f"verdict {result.verdict}: {result.states:,} states in {result.seconds:.1f} s")
    for bounds, part in result.parts:
        for violation in part.violations:
            if as_mermaid:
                typer.echo(report.picture(violation, bounds))
            else:
                print_way(violation)


def print_way(violation: Violation) -> None:
    for line in numbered(violation.trace):
        typer.echo(line)
    typer.echo(f"{violation.name}: {violation.text}")
