"""Code that users bring: a function or class named as `path/to/file.py:name` or `module:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = f"{Path(__file__).parent}/"
"""What the names of memjax's own files begin with."""

_STDLIB = f"{Path(difflib.__file__).parent}/"


def is_library(file: str) -> bool:
    """Whether a frame's file is Python's or an installed package's."""
    return file.startswith((_STDLIB, "<")) or "-packages/" in file  # site- or dist-


def is_own(name: str) -> bool:
    """Whether a name means code of the user's."""
    return ":" in name


def load_own(name: str, what: str) -> Any:
    """What `name` means, imported. ValueError, which calls it a `what`, where there is no such thing.

    The current directory is on the path, as with `python -m`. A file may import what lies beside it.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{name!r} names no {what}: write path/to/file.py:name or module:name")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _file(Path(place).expanduser().absolute()) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        raise ValueError(f"there is no file {place}, which should hold the {what} {attribute}") from None
    except (Exception, SystemExit) as error:  # the boundary around a user's module: whatever it raises is told
        raise ValueError(f"the {what} {name} could not be imported: {_told(error)}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [known for known in vars(found) if not known.startswith("_")]
            near = difflib.get_close_matches(part, own, n=1)
            advice = f"did you mean {near[0]}?" if near else f"it defines {', '.join(own[:20]) or 'nothing'}"
            raise ValueError(f"{place} does not define {part}, the {what} that was asked for: {advice}")
        found = getattr(found, part)
    return found


def hash_of(name: str) -> str | None:
    """A hash of the file that holds what `name` means, which is not imported; None where there is no such file."""
    place = name.rpartition(":")[0]
    found = [Path(root, *place.split(".")).with_suffix(".py") for root in ("", *sys.path)]
    if place.endswith(".py"):
        found = [Path(place).expanduser()]
    return next((_hash(path) for path in found if path.is_file()), None)


def hash_of_source(made: Any) -> str | None:
    """A hash of the file in which a class or function is written; None where there is no such file."""
    try:
        return _hash(Path(inspect.getsourcefile(made) or ""))
    except (TypeError, OSError):
        return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@cache
def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: Exception | SystemExit) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"there is no module {error.name} (looked in the current directory, {Path.cwd()}, and what is installed)"
    where = traceback.extract_tb(error.__traceback__)[-1]
    line = error.lineno if isinstance(error, SyntaxError) else where.lineno
    file = error.filename if isinstance(error, SyntaxError) else where.filename
    return f"{type(error).__name__}: {getattr(error, 'msg', error)} ({file}, line {line})"
