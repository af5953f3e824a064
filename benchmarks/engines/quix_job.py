"""Quix Streams with exactly-once: one Python process, which is how its users begin (they add processes to go on).

python -m benchmarks.engines.quix_job '<job>'
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from benchmarks.engines.talk import ENDED, SESSION, STARTED, STOP, Job, tell, words


def build(job: Job) -> Any:
    from quixstreams import Application

    app = Application(
        broker_address=job.servers,
        consumer_group="bench-quix",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=job.commit_ms / 1000,
        state_dir=f"{job.folder}/state",
        auto_create_topics=job.count,
        loglevel="WARNING",
    )
    rows = app.dataframe(app.topic(job.input, key_deserializer="bytes", value_deserializer="bytes"))
    if job.count:
        rows = rows.apply(_count, stateful=True)
    for topic in job.outputs:
        rows = rows.to_topic(app.topic(topic, key_serializer="bytes", value_serializer="bytes"))
    return app


def _count(_: bytes, state: Any) -> bytes:
    count = state.get("count", 0) + 1
    state.set("count", count)
    return str(count).encode()


def main() -> None:
    job = Job.from_json(sys.argv[1])
    app = build(job)
    tell(SESSION)

    def obey() -> None:
        for word in words():
            if word == STOP:
                tell(ENDED)
                break
        app.stop()

    threading.Thread(target=obey, daemon=True).start()
    tell(STARTED)
    app.run()


if __name__ == "__main__":
    main()
