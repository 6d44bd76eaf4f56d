"""Directories of one owner, the ids that name them, and the records in them.

Every thing that is kept is a directory with an id for its name, whole from the moment that it has that name until it
loses it: what is being written or removed has a name with a dot before it. The time of the directory is its last use.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from memjax.serve.errors import ApiError

log = logging.getLogger(__name__)

Record = TypeVar("Record", bound=BaseModel)


def make_id(kind: str) -> str:
    """An id that nobody guesses."""
    return f"{kind}-{secrets.token_hex(12)}"


def directory_of(parent: Path, kind: str, given: str) -> Path:
    """The directory with this id under `parent`; ApiError 404 where there is none: of what is no id no path is made."""
    if not re.fullmatch(rf"{kind}-[0-9a-f]{{24}}", given) or not (parent / given).is_dir():
        raise missing(kind, given)
    return parent / given


def directories(root: Path, kind: str, owner: str = "*") -> Iterator[Path]:
    """The directories of one owner, or of everybody, whatever is in them."""
    return (path for path in root.glob(f"{owner}/{kind}-*") if path.is_dir())


def missing(kind: str, given: str) -> ApiError:
    """Nothing with this id is there, or it is somebody else's."""
    return ApiError(404, f"there is no {kind} {given[:60]!r}")


class DamagedError(Exception):
    """Why what is kept in a directory cannot be used, in words without a path."""


def read_record(path: Path, cls: type[Record]) -> Record:
    """The record at `path`; DamagedError for anything else."""
    try:
        return cls.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError("its record is missing") from None
    except OSError as error:
        raise DamagedError(f"its record cannot be read ({error.strerror})") from None
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
        raise DamagedError(f"its record is damaged, or of another version of memjax ({place[:80]})") from None
    except Exception as error:  # an agent of one's own, whose code can raise anything, must not cost other records
        log.warning("the record %s cannot be read", path, exc_info=True)
        raise DamagedError(f"its record cannot be read ({type(error).__name__}, which the server has logged)") from None


@contextmanager
def directory_for(directory: Path) -> Iterator[Path]:
    """Another directory, for what the block writes, which then gets this name; nothing is left where it fails."""
    hidden = directory.with_name(f".{directory.name}")
    try:
        with full_disk_as_error():
            hidden.mkdir(parents=True, mode=0o700)
        yield hidden
        with full_disk_as_error():
            touch(hidden)
            hidden.rename(directory)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def remove(directory: Path) -> None:
    """Remove a directory with all that is in it; ApiError 507 where that cannot be."""
    hidden = directory.with_name(f".{directory.name}")
    try:
        directory.rename(hidden)
    except FileNotFoundError:
        return
    except OSError:  # a disk may be too full even for this
        hidden = directory
    shutil.rmtree(hidden, ignore_errors=True)
    if hidden.exists():
        raise ApiError(507, "the server's state directory cannot be written: not everything was deleted, try again")


def sweep(found: Iterable[Path], before: float) -> None:
    """Remove the directories last used before that time, and log them."""
    for directory in found:
        if (used := last_used(directory)) < before:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
            try:
                remove(directory)
                log.info("%s is forgotten: it was last used at %s", directory.name, day)
            except ApiError as error:
                log.error("%s, last used at %s, is not forgotten: %s", directory.name, day, error)


def open_state(state_dir: Path) -> None:
    """Make the state directory its owner's alone, and remove what a server that was killed left unfinished. OSError."""
    make_private(state_dir)
    shutil.rmtree(state_dir / "brought", ignore_errors=True)
    for path in state_dir.glob("*/*/.*-*"):
        shutil.rmtree(path, ignore_errors=True)


def make_private(state_dir: Path) -> None:
    """Make the state directory where it is missing, and nobody else's business in any case. OSError."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    state_dir.chmod(0o700)


def touch(directory: Path) -> None:
    """Say that a directory is used now."""
    now = time.time()
    with suppress(OSError):
        os.utime(directory, (now, now))


def kept_since(directory: Path) -> float:
    """When the oldest file of a directory was written, in seconds since 1970."""
    return min((last_used(path) for path in directory.glob("*")), default=last_used(directory))


def last_used(directory: Path) -> float:
    """When a directory was last used, in seconds since 1970; for ever after where it is gone."""
    try:
        return directory.stat().st_mtime
    except OSError:
        return float("inf")


@contextmanager
def full_disk_as_error() -> Iterator[None]:
    """Answer a disk that is full, or gone, with a status."""
    try:
        yield
    except OSError as error:
        raise ApiError(507, f"{disk_problem(error)}: nothing was kept of this request") from None


def disk_problem(error: OSError) -> str:
    """What an error of the disk means for the state directory."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the server's state directory is full ({error.strerror})"
    return f"the server's state directory cannot be written ({error.strerror or type(error).__name__})"


def size_of(directory: Path) -> int:
    """The bytes of the files below a directory; one that has two names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it was deleted meanwhile
                stat = os.stat(os.path.join(place, name))
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())
