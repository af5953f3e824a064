"""Programs of Debian packages: where they lie, and how a missing package is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from semel.dev.jars import Say, unavailable
from semel.errors import ConfigError, SemelError

INSTALL_TIMEOUT_S_MAX = 900
LOCK_TIMEOUT_S_MAX = 120
# Debian asks this program before a package may start or restart a service; 101 is "no".
POLICY = Path("/usr/sbin/policy-rc.d")
FORBIDDEN = 101
_POLICY_TEXT = "#!/bin/sh\n# semel dev put this here while it installs a package. It can be removed.\nexit 101\n"


@dataclass(frozen=True)
class Product:
    """A server as Debian packs it."""

    title: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    # Each a list of folders that is searched like PATH. The first one that holds every program wins.
    places: tuple[str, ...]


def find(product: Product) -> Mapping[str, str] | None:
    """The path of every program by its name; None unless all of them are there."""
    for place in product.places:
        found = {name: path for name in product.programs if (path := shutil.which(name, path=place))}
        if len(found) == len(product.programs):
            return found
    return None


def install(product: Product, say: Say) -> None:
    """Install the packages of a server. Their own services stay down: the port and the data would not be ours."""
    names = " ".join(product.packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ConfigError(
            f"{product.title} is not installed on this machine.",
            remedy=f"Install it: sudo apt-get install -y --no-install-recommends {names}",
        )
    say(f"installing {product.title} (Debian: {names}; once; a minute or so, at most {INSTALL_TIMEOUT_S_MAX} s)")
    with _services_stay_down(product):
        complaint = _apt_get("install", product.packages)
        if complaint:
            # A fresh machine, and every small image, has no list of packages, or an old one.
            say("fetching the list of packages, then trying again")
            complaint = _apt_get("update", ()) or _apt_get("install", product.packages)
    if complaint:
        raise _not_installed(product, complaint)


@contextmanager
def _services_stay_down(product: Product) -> Iterator[None]:
    try:
        file = os.open(POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:
        _refuse_unless_forbidden(product)
        yield
        return
    try:
        with os.fdopen(file, "w") as out:
            out.write(_POLICY_TEXT)
            # Whatever the umask says.
            os.fchmod(out.fileno(), 0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def _refuse_unless_forbidden(product: Product) -> None:
    """This machine has a policy of its own, which is not ours to change. Debian asks it only if it can be run."""
    asked = [str(POLICY), product.packages[0], "start"]
    if os.access(POLICY, os.X_OK) and subprocess.run(asked, timeout=60, check=False).returncode == FORBIDDEN:  # noqa: S603  the arguments are ours, there is no shell
        return
    raise ConfigError(
        f"{product.title} is not installed, and {POLICY} lets a package start its service while it is installed.",
        remedy=f"Install it by hand, and stop its service: apt-get install {' '.join(product.packages)}",
    )


def _apt_get(verb: str, packages: Sequence[str]) -> str:
    """Run apt-get. Returns what went wrong, or nothing."""
    options = ["-q", "-y", "-o", f"DPkg::Lock::Timeout={LOCK_TIMEOUT_S_MAX}"]
    options += ["--no-install-recommends", "--no-upgrade"] if packages else []
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(  # noqa: S603  the arguments are ours, there is no shell
            ["apt-get", verb, *options, *packages],  # noqa: S607  wherever this system has it
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {INSTALL_TIMEOUT_S_MAX} s"
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["it said nothing"]
    telling = next((line for line in lines if line.startswith("E:")), lines[-1])
    return telling if done.returncode else ""


def _not_installed(product: Product, complaint: str) -> SemelError:
    return unavailable(
        f"{product.title} could not be installed: {complaint}",
        remedy=f"Install it by hand, then try again: apt-get install {' '.join(product.packages)}",
    )
