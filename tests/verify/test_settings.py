"""What a run is asked to do, and the command that asks for it again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.verify.settings import Settings


def test_the_command_to_play_it_again_says_all_that_the_plan_depends_on() -> None:
    settings = Settings(
        seed=7,
        target="my shop.py:orders",
        servers=("kafka",),
        topics=("in", "out"),
        faults=("point", "zombie"),
        identity="order id",
        master="local-cluster[2,1,1024]",
        conf={"spark.sql.shuffle.partitions": "3", "spark.app.note": "it's $HOME; x"},
        kills=3,
        rows=10,
        rows_per_batch=5,
    )
    assert shlex.split(settings.replay) == [
        *("semel", "verify", "my shop.py:orders", "--with", "kafka", "--topics", "in,out", "--faults", "point,zombie"),
        *("--id", "order id", "--master", "local-cluster[2,1,1024]"),
        *("--conf", "spark.sql.shuffle.partitions=3", "--conf", "spark.app.note=it's $HOME; x"),
        *("--seed", "7", "--kills", "3", "--rows", "10", "--rows-per-batch", "5"),
    ]


def test_what_is_as_always_is_left_out_of_the_command() -> None:
    settings = Settings(seed=7, sinks=("kafka", "postgres:upsert"), guarantee="at-least-once")
    assert settings.replay == (
        "semel verify --sinks kafka,postgres:upsert --guarantee at-least-once "
        "--seed 7 --kills 20 --rows 20000 --rows-per-batch 500"
    )


def test_secrets_are_not_in_the_command() -> None:
    conf = {"spark.hadoop.fs.s3a.secret.key": "hunter2", "spark.jdbc.Password": "hunter2"}
    replay = Settings(seed=7, target="shop.py", conf=conf).replay
    assert "hunter2" not in replay
    assert shlex.split(replay)[3:7] == [
        "--conf",
        "spark.hadoop.fs.s3a.secret.key=...",
        "--conf",
        "spark.jdbc.Password=...",
    ]


def test_a_server_of_semel_dev_is_not_mistaken_for_one_of_the_run(tmp_path: Path) -> None:
    """The names would be one entry, and the faults of the run would strike the wrong one."""
    for named in ({"target": "shop.py", "servers": ("postgres",)}, {"sinks": ("postgres:upsert",)}):
        with pytest.raises(ConfigError, match="postgres is started for this run"):
            Settings(seed=1, breakable=("postgres",), output=tmp_path, **named)
    assert Settings(seed=1, target="shop.py", servers=("kafka",), breakable=("postgres",)).breakable == ("postgres",)
