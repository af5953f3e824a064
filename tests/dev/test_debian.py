"""Programs of Debian packages, with an apt-get of our own that installs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semel.dev import debian
from semel.dev.debian import Product, find, install
from semel.errors import ConfigError, SemelError


@pytest.fixture
def product(tmp_path: Path) -> Product:
    newest, oldest = tmp_path / "2" / "bin", tmp_path / "1" / "bin"
    for folder in (newest, oldest):
        folder.mkdir(parents=True)
    return Product("Server", ("server-core", "server-client"), ("one", "two"), (str(newest), str(oldest)))


@pytest.fixture
def as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(debian, "POLICY", tmp_path / "policy-rc.d")


def program(file: Path, script: str = "") -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def apt_get(folder: Path, script: str) -> None:
    """An apt-get that writes down its words, and what the policy answers meanwhile."""
    program(
        folder / "apt-get", f"cd '{folder}'; echo \"$@\" >>words; ./policy-rc.d x start; echo $? >>policy; {script}"
    )


def test_the_first_place_with_all_programs_wins(product: Product, tmp_path: Path) -> None:
    assert find(product) is None
    program(tmp_path / "2" / "bin" / "one")
    for name in product.programs:
        program(tmp_path / "1" / "bin" / name)
    assert find(product) == {name: f"{tmp_path}/1/bin/{name}" for name in ("one", "two")}
    program(tmp_path / "2" / "bin" / "two")
    assert find(product) == {name: f"{tmp_path}/2/bin/{name}" for name in ("one", "two")}


def test_who_is_not_root_is_told_the_command(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError) as raised:
        install(product, print)
    assert raised.value.what == "Server is not installed on this machine."
    command = "sudo apt-get install -y --no-install-recommends server-core server-client"
    assert raised.value.remedy == f"Install it: {command}"


def test_a_package_is_installed_and_its_service_stays_down(product: Product, as_root: None, tmp_path: Path) -> None:
    apt_get(tmp_path, "exit 0")
    said: list[str] = []
    install(product, said.append)
    assert [line.startswith("installing Server (Debian: server-core server-client; once;") for line in said] == [True]
    (words,) = (tmp_path / "words").read_text().splitlines()
    assert (words.startswith("install -q -y"), words.endswith("server-core server-client")) == (True, True)
    assert (tmp_path / "policy").read_text() == "101\n"
    assert not (tmp_path / "policy-rc.d").exists()


def test_an_old_list_of_packages_is_fetched_anew(product: Product, as_root: None, tmp_path: Path) -> None:
    apt_get(tmp_path, "test $1 = update && touch updated; test -e updated")
    install(product, print)
    assert [line.split()[0] for line in (tmp_path / "words").read_text().splitlines()] == [
        "install",
        "update",
        "install",
    ]


def test_what_apt_says_is_quoted(product: Product, as_root: None, tmp_path: Path) -> None:
    apt_get(tmp_path, "echo Reading; echo 'E: Unable to locate package server-core' >&2; exit 100")
    with pytest.raises(SemelError) as raised:
        install(product, print)
    assert raised.value.what == "Server could not be installed: E: Unable to locate package server-core"
    assert not (tmp_path / "policy-rc.d").exists()


@pytest.mark.parametrize(("answer", "mode", "installs"), [(101, 0o755, True), (0, 0o755, False), (101, 0o644, False)])
def test_a_policy_of_the_machine_is_asked_and_left_alone(
    product: Product, as_root: None, tmp_path: Path, answer: int, mode: int, installs: bool
) -> None:
    policy = tmp_path / "policy-rc.d"
    program(policy, f"exit {answer}")
    policy.chmod(mode)
    apt_get(tmp_path, "exit 0")
    if installs:
        install(product, print)
    else:
        with pytest.raises(ConfigError, match="lets a package start its service while it is installed"):
            install(product, print)
    assert policy.read_text() == f"#!/bin/sh\nexit {answer}\n"
    assert (tmp_path / "words").exists() == installs
