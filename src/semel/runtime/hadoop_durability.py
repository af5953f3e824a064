"""Whether a checkpoint on HDFS outlives a power cut of the data nodes: only their own setting can say so.

Spark closes its files before anybody can ask for `hsync`, and a closed file cannot be made durable afterwards. If it is
opened for append and synced, its blocks reach the disk. Their final names do not, because the data node renames them
only when it closes them. `dfs.datanode.synconclose` syncs both (HDFS-5042). The name node syncs its own log of names
anyway.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from semel.decisions.hadoop import hadoop_conf, jvm_of
from semel.decisions.stores import MOUNTS, path_behind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "dfs.datanode.synconclose"
NODES_ASKED_MAX = 5
ANSWER_S_MAX = 5.0
ANSWER_BYTES_MAX = 1 << 16
NOT_FOUND = 404
#: As XML or as JSON, which Hadoop takes from headers rather than from what the address asks for.
_VALUE = re.compile(r"""value["'\s:>]+(true|false)""")


def hadoop_durability_warning(spark: SparkSession, location: str) -> str:
    """What to tell at the start of a pipeline whose checkpoint is there; empty when there is nothing to say.

    It never raises: what cannot be seen is said. Silent data nodes take some seconds in all, and few are asked.
    """
    try:
        addresses = _data_nodes(spark, location)
    except Exception as error:  # noqa: BLE001 - the user may be no superuser, or the client too old to ask
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return _not_known(location, f"the name node does not list its data nodes to us ({first[:120]})")
    if addresses is None:
        return ""
    asked = addresses[:NODES_ASKED_MAX]
    # All at once: those that are silent are waited for together.
    with ThreadPoolExecutor(NODES_ASKED_MAX, "semel-ask") as pool:
        answers = dict(zip(asked, pool.map(_asked, asked), strict=True))
    unset = [address for address, said in answers.items() if said == "false"]
    if unset:
        return (
            f"A power cut of the cluster may lose what Spark wrote to {location}: {SETTING} is false on "
            f"{_listed(unset)}. Crashes of processes and of single machines lose nothing. Set it to true in the "
            "hdfs-site.xml of the data nodes and restart them."
        )
    silent = [address for address, said in answers.items() if said != "true"]
    if silent or not answers:
        return _not_known(location, f"no answer from {_listed(silent)}" if silent else "there is no data node")
    return ""


def _not_known(location: str, why: str) -> str:
    return (
        f"Whether what Spark writes to {location} outlives a power cut of the cluster is not known: {why}. It does if "
        f"{SETTING} is true on every data node. Crashes of processes and of single machines lose nothing."
    )


def _data_nodes(spark: SparkSession, location: str) -> list[str] | None:
    """The HTTP addresses of the live data nodes; None when the file system is not HDFS."""
    path = jvm_of(spark).org.apache.hadoop.fs.Path(location)
    file_system: Any = path.getFileSystem(hadoop_conf(spark))
    if file_system.getScheme() == MOUNTS:
        file_system = path_behind(file_system, file_system.makeQualified(path)).getFileSystem(hadoop_conf(spark))
    if file_system.getScheme() != "hdfs":
        return None
    return [str(node.getInfoAddr()) for node in file_system.getDataNodeStats()]


def _asked(address: str) -> str:
    """What the data node itself has for the setting, "true" or "false", or nothing when it does not say."""
    try:
        with _open(f"http://{address}/conf?name={SETTING}") as answer:
            found = _VALUE.search(answer.read(ANSWER_BYTES_MAX).decode(errors="replace"))
    except HTTPError as error:
        # It has no such property, so that Hadoop's default holds.
        return "false" if error.code == NOT_FOUND else ""
    except (OSError, HTTPException):
        return ""
    return found[1] if found else ""


def _open(request: str) -> Any:
    # Without a proxy: the address is one of the cluster's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=ANSWER_S_MAX)


def _listed(addresses: Iterable[str]) -> str:
    return ", ".join(sorted(addresses))
