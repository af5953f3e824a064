"""The contract of every sink, for this one."""

from typing import Any

from semel.testing.contract import *
from semel.testing.fixtures import fixtures
from semel.testing.harness import Harness, Rows
from semel_jsonl import JsonLines


class JsonLinesHarness(Harness):
    kind = "jsonl"
    committed_failpoint = "jsonl.committed"

    def sink(self, name: str = "") -> JsonLines:
        return JsonLines(str(self.folder / "orders"), name=name or "orders")

    def neighbour(self) -> JsonLines:
        return JsonLines(str(self.folder / "returns"), name="returns")

    def visible(self, sink: Any) -> Rows:
        return sorted((row["id"], row["text"]) for row in sink.rows())

    def staged(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*/_staged/*.jsonl"))

    def lose(self, branch: str) -> None:
        (self.folder / "orders" / "_staged" / f"{branch}.jsonl").unlink()

    def markers(self) -> int:
        return len([*self.folder.glob("*/b*.jsonl"), *self.folder.glob("*/_fences/*/*")])

    def put_foreign_things(self) -> None:
        (self.folder / "orders" / "_staged" / "notes.jsonl").write_text("not ours")


harness, durable_harness = fixtures({"jsonl": JsonLinesHarness})
