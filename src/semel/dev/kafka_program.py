"""Kafka as a program: its jars, and what is made from them once for all brokers of this machine."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from semel.dev.jars import Coordinate, Say, cache_folder, fetch, java, unavailable
from semel.dev.kafka_settings import Layout, Ports, as_text, properties_of
from semel.dev.ports import free_ports, listens
from semel.dev.process import Process, spawn

KAFKA = Coordinate("org.apache.kafka", "kafka_2.13", "4.1.2")
# Kafka logs through SLF4J and leaves it to whoever runs it to say where to; this one writes to stderr.
LOGGING = Coordinate("org.slf4j", "slf4j-simple", "1.7.36")
PREPARE_TIMEOUT_S_MAX = 60
CHECKPOINT = "bootstrap.checkpoint"


@dataclass(frozen=True)
class Program:
    """What it takes to run a broker."""

    java: str
    jars: tuple[Path, ...]
    folder: Path

    def command(self, layout: Layout, broker: int, *, sharing: str = "") -> list[str]:
        compiler = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if layout.quick else ["-XX:+UseG1GC"]
        crash = f"-XX:ErrorFile={layout.broker_folder(broker)}/crash-%p.log"
        options = [f"-Xmx{layout.heap_mb}m", *compiler, crash, sharing or f"-XX:SharedArchiveFile={self.archive}"]
        if layout.security is not None and layout.security.kerberos is not None:
            options.append(f"-Djava.security.krb5.conf={layout.security.kerberos.config}")
        return [self.java, *options, *self.classes, "kafka.Kafka", str(layout.settings(broker))]

    @property
    def classes(self) -> list[str]:
        logging = {
            "defaultLogLevel": "warn",
            # It tells every failed connection, several a second while another broker is down.
            "log.org.apache.kafka.clients.NetworkClient": "error",
            "showDateTime": "true",
            "dateTimeFormat": "yyyy-MM-dd HH:mm:ss.SSS",
        }
        settings = [f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in logging.items()]
        return [*settings, "-cp", os.pathsep.join(map(str, self.jars))]

    @property
    def archive(self) -> Path:
        """The classes of Kafka as this very Java keeps them in memory: a third less work at every start."""
        binary = Path(self.java).resolve()
        build = f"{binary} {binary.stat().st_mtime_ns} {self.jars}"
        return self.folder / f"classes-{hashlib.sha256(build.encode()).hexdigest()[:12]}.jsa"

    @property
    def checkpoint(self) -> Path:
        """The features of a new cluster, as Kafka's own tool writes them down."""
        return self.folder / CHECKPOINT


def program(say: Say) -> Program:
    """Kafka, ready to run. A second call needs neither network nor time."""
    jars = {jar.name: jar for coordinate in (LOGGING, KAFKA) for jar in fetch(str(coordinate), say=say)}
    found = Program(java(), tuple(jars.values()), cache_folder().parent / "kafka" / KAFKA.version)
    if not (found.checkpoint.is_file() and found.archive.is_file()):
        say("preparing Kafka for quick starts (once; about 10 s)")
        found.folder.mkdir(parents=True, exist_ok=True)
        # Made aside and renamed: a run that is cut short leaves nothing that looks complete.
        with tempfile.TemporaryDirectory(dir=found.folder) as text:
            _prepare(found, Layout(Path(text), (Ports(*free_ports(3)),)))
    return found


def format_data(found: Program, layout: Layout, broker: int, cluster: str) -> None:
    """Make a data folder that the broker takes for its own. One that is there stays as it is.

    Kafka's own tool takes two seconds of a JVM per broker for these two small files.
    """
    data = layout.data_folder(broker)
    if (data / "meta.properties").is_file():
        return
    data.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found.checkpoint, data / CHECKPOINT)
    identity = {"version": "1", "cluster.id": cluster, "node.id": str(broker), "directory.id": new_id()}
    # This file comes last: it says that the folder is complete.
    (data / "meta.properties").write_text(as_text(identity))


def new_id() -> str:
    """An identity as Kafka spells it: 16 random bytes in 22 letters."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _prepare(found: Program, layout: Layout) -> None:
    layout.broker_folder(0).mkdir()
    layout.settings(0).write_text(as_text(properties_of(layout, 0)))
    _format_with_kafkas_tool(found, layout)
    shutil.copyfile(layout.data_folder(0) / CHECKPOINT, layout.folder / CHECKPOINT)
    archive = layout.folder / "classes.jsa"
    # Java writes it when the broker ends.
    broker = spawn(found.command(layout, 0, sharing=f"-XX:ArchiveClassesAtExit={archive}"), layout.log(0))
    try:
        _wait_for_port(layout.ports[0].client, broker)
    finally:
        broker.stop(PREPARE_TIMEOUT_S_MAX)
    if not _is_whole(found, archive):
        # Java passes over an empty one, but crashes over one that a full disk cut short.
        archive.unlink(missing_ok=True)
        archive.touch()
    archive.rename(found.archive)
    (layout.folder / CHECKPOINT).rename(found.checkpoint)


def _format_with_kafkas_tool(found: Program, layout: Layout) -> None:
    command = [found.java, *found.classes, "kafka.tools.StorageTool", "format"]
    command += ["--cluster-id", new_id(), "--config", str(layout.settings(0))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_TIMEOUT_S_MAX, check=False)  # noqa: S603  the arguments are ours, there is no shell
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise unavailable(
            f"Kafka {KAFKA.version} could not format a folder: {lines[-1] if lines else 'it said nothing'}.",
            remedy=f"Check that {found.java} is Java 17 or newer and that the disk is not full, then try again.",
        )


def _is_whole(found: Program, archive: Path) -> bool:
    command = [found.java, "-Xshare:on", f"-XX:SharedArchiveFile={archive}", *found.classes, "-version"]
    return subprocess.run(command, capture_output=True, timeout=PREPARE_TIMEOUT_S_MAX, check=False).returncode == 0  # noqa: S603  the arguments are ours, there is no shell


def _wait_for_port(port: int, server: Process) -> None:
    deadline = time.monotonic() + PREPARE_TIMEOUT_S_MAX
    while server.is_alive() and not listens(port) and time.monotonic() < deadline:
        time.sleep(0.1)
