"""Pipeline files: a Python file with functions marked `@semel.pipeline`, or with writers at module level."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from semel.errors import ConfigError, SemelError
from semel.runtime.pipeline import Pipeline, StreamWriter


def load_pipelines(target: str) -> tuple[Pipeline, ...]:
    """The pipelines of `FILE`, or the one that `FILE:NAME` names."""
    path, name = split_target(target)
    found = find_pipelines(import_file(path))
    if not found:
        raise ConfigError(
            f"There is no pipeline in {path}.",
            remedy="Mark a function with @semel.pipeline that gets `spark` and returns semel.write(df).to(...).",
        )
    _refuse_namesakes(path, found)
    chosen = tuple(p for p in found if name in ("", p.name))
    if not chosen:
        raise ConfigError(
            f"There is no pipeline {name!r} in {path}.",
            remedy=f"Name one of those that exist: {', '.join(p.name for p in found)}.",
        )
    return chosen


def split_target(target: str) -> tuple[Path, str]:
    """`FILE[:NAME]` -> file and name. A colon that belongs to an existing file's name stays there."""
    file, colon, name = target.rpartition(":")
    if not colon or Path(target).exists():
        return Path(target), ""
    return Path(file), name


def import_file(path: Path) -> ModuleType:
    """Run the file as a module. Its folder joins the import path for good, as it does for `python FILE`."""
    if not path.is_file():
        raise ConfigError(
            f"There is no pipeline file {path}.", remedy="Name a Python file: semel run FILE.py or FILE.py:NAME."
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A name that no import statement can spell: the file never hides a module of the same name.
    spec = importlib.util.spec_from_file_location(f"pipeline file {path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.", remedy="Give the pipeline file a name that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except SemelError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} does not import: {place_and_error(error, path)}", remedy=_remedy(error)) from error
    _pickle_by_value(module)
    return module


def _remedy(error: Exception) -> str:
    """The file is read before Spark starts, because it says which packages Spark is to start with."""
    if "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error):
        return (
            "Move the line into the pipeline function, where Spark runs; or give a type as LongType(), not as 'long'."
        )
    return "Mend the line and start again."


def place_and_error(error: BaseException, path: Path) -> str:
    """ "line 7: NameError: name 'x' is not defined": the innermost line of the user's file, not of a library."""
    here = path.resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.lineno and Path(frame.filename).resolve() == here]
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(error.lineno)
    words = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines() or [""]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {words[0]}"


def find_pipelines(module: ModuleType) -> tuple[Pipeline, ...]:
    """Every pipeline that the module holds, once, in the order of the file. A writer is a pipeline already built."""
    found: dict[int, Pipeline] = {}
    for variable, value in vars(module).items():
        if isinstance(value, Pipeline):
            found.setdefault(id(value), value)
        elif isinstance(value, StreamWriter):
            found.setdefault(id(value), _built_already(value, value.name or variable))
    return tuple(found.values())


def _built_already(writer: StreamWriter, name: str) -> Pipeline:
    return Pipeline(lambda _spark: writer, name)


def _refuse_namesakes(path: Path, pipelines: Iterable[Pipeline]) -> None:
    twice = [name for name, n in Counter(p.name for p in pipelines).items() if n > 1]
    if twice:
        raise ConfigError(
            f"{path} has more than one pipeline named {', '.join(twice)}.",
            remedy='Give each a name of its own: @semel.pipeline(name="...").',
        )


def _pickle_by_value(module: ModuleType) -> None:
    """Executors cannot import the pipeline file, so functions of it that run there travel as code."""
    try:
        from pyspark import cloudpickle
    except ImportError:  # the session says so, in the words of a missing extra
        return
    register: Any = cloudpickle.register_pickle_by_value
    register(module)
