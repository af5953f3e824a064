"""How `semel verify` looks at a folder of JSON Lines: as any user would."""

import time

from semel.errors import ConfigError
from semel.ids import PipelineId
from semel.verify.readers import Reader
from semel.verify.readers.base import names_ours
from semel_jsonl import JsonLines


class JsonLinesReader(Reader):
    sink: JsonLines

    def check_ready(self) -> None:
        if any(self.sink.rows()):
            raise ConfigError(f"{self.sink.describe()}: there are rows.", remedy="Name a new folder for this run.")

    def look(self) -> None:
        self.show(time.time(), [row[self.workload.identity] for row in self.sink.rows()])

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        names = sorted(file.stem for file in self.sink.staged("").parent.glob("*.jsonl"))
        return [f"staged file {name}" for name in names if names_ours(name, pipeline, self.sink.name)]
