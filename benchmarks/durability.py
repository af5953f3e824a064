"""What it costs to make a checkpoint durable before a decision: fsync of what is new against one syncfs.

    python benchmarks/durability.py [--folder DIR] [--batches N] [--json]

Files are written as Spark writes them, without Spark: a plan, a commit and an entry of a source, and a delta for each
state partition, each with its checksum. A neighbour writes 256 MB to the same disk meanwhile and syncs nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from semel.runtime.durability import CheckpointSync, How

PARTITIONS = (0, 1, 4, 16, 200)
NEIGHBOUR_BYTES = 256 << 20
WAYS: tuple[How, ...] = ("fsync", "syncfs", "auto")


def put(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, content in (
        (path, bytes(size)),
        (path.with_name(f".{path.name}.crc"), bytes(8 + 4 * (size // 512 + 1))),
    ):
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(content)
        temporary.rename(target)


def write_batch(root: Path, batch: int, partitions: int) -> None:
    for name, size in ((f"sources/0/{batch}", 200), (f"offsets/{batch}", 900), (f"commits/{batch - 1}", 45)):
        put(root / name, size)
    for partition in range(partitions):
        put(root / "state" / "0" / str(partition) / f"{batch + 1}.delta", 1500)


def measure(folder: Path, partitions: int, how: How, batches: int, *, neighbour: bool = False) -> dict[str, object]:
    root = Path(tempfile.mkdtemp(dir=folder))
    spent: list[float] = []
    try:
        with CheckpointSync(root, how) as sync:
            for batch in range(1, batches + 2):
                write_batch(root, batch, partitions)
                if neighbour:
                    (root.parent / "neighbour").write_bytes(bytes(NEIGHBOUR_BYTES))
                began = time.perf_counter()
                sync.settle(batch)
                spent.append((time.perf_counter() - began) * 1000)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        (root.parent / "neighbour").unlink(missing_ok=True)
    # The first one finds everything new, the folders included.
    later = sorted(spent[1:])
    return {
        "partitions": partitions,
        "how": how,
        "neighbour": neighbour,
        "ms_median": round(statistics.median(later), 2),
        "ms_max": round(later[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk that is measured")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = []
    for partitions in PARTITIONS:
        found += [measure(chosen.folder, partitions, how, chosen.batches) for how in WAYS]
    found += [measure(chosen.folder, 1, how, 3, neighbour=True) for how in WAYS]
    if chosen.json:
        print(json.dumps({"durability": found}))
        return
    for row in found:
        beside = " beside a neighbour" if row["neighbour"] else ""
        print(
            f"{row['partitions']:>4} partitions {row['how']:<7} {row['ms_median']:>8} ms (max {row['ms_max']}){beside}"
        )


if __name__ == "__main__":
    main()
