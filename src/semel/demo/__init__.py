"""`semel demo`: a pipeline is killed again and again, beside the same thing in plain Spark, and both are audited.

orders     the seeded input, and the thread that writes it file by file
plan       when and where each life is killed, from the seed
pipelines  the pipeline file that `semel run` gets; read it first
baseline   the same in plain Spark, as people write it
child      one life of a process group: start, events, kill
side       all lives of one contestant
audit      input against output
game       both sides at once, then the result
screen     what the terminal shows
timeline   the picture
"""

from pathlib import Path


def pipelines_path() -> Path:
    """The pipeline file of the demo."""
    return Path(__file__).with_name("pipelines.py")
