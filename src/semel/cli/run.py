"""`semel run`."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from semel.cli.display import display_for
from semel.errors import ConfigError
from semel.run import runner
from semel.run.happenings import GRACE_S
from semel.run.loading import split_target
from semel.run.session import SparkSettings

#: As a shell says it of a program that SIGPIPE has ended.
NOT_READ = 128 + signal.SIGPIPE


def run(
    target: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A pipeline file, or one pipeline of it.")],
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = "local[*]",
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark setting; repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")] = False,
    grace_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long a stop waits for the batch at hand.")
    ] = GRACE_S,
    show_spark_log: Annotated[bool, typer.Option("--show-spark-log", help="Leave Spark's own log on stderr.")] = False,
) -> None:
    """Run the pipelines of a file until they end, one fails, or Ctrl-C or SIGTERM stops them after their batch.

    Exit codes: 0 ended or stopped clean, 1 failed, 2 wrong input or checkpoint, 3 another incarnation runs it,
    4 failed or stopped with a batch that is decided, or may be, and not visible everywhere: the error says what to do,
    141 stopped clean because nobody reads the output any more (not with --json).
    """
    settings = SparkSettings(
        master=master,
        conf=dict(key_and_value(item) for item in conf or ()),
        app=f"semel {split_target(target)[0].stem}",
        folder=str(split_target(target)[0].resolve().parent),
        show_log=show_spark_log,
    )
    with display_for(json=json) as display:
        runner.run(target, settings, display.hear, grace_s=grace_s, is_wanted=display.is_read)
        if not display.is_read():
            raise typer.Exit(NOT_READ)


def key_and_value(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not (key and equals):
        raise ConfigError(f"--conf {item} is not KEY=VALUE.", remedy="Write it as --conf spark.some.setting=value.")
    return key, value
