"""Directories of one owner, the ids that name them, and the records in them."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from memjax.serve.errors import ApiError

Record = TypeVar("Record", bound=BaseModel)


def make_id(kind: str) -> str:
    """An id that nobody guesses."""
    return f"{kind}-{secrets.token_hex(12)}"


def directory_of(parent: Path, kind: str, given: str) -> Path:
    """Where the thing with this id lies under `parent`; ApiError 404 for what is no id: no path is made of it."""
    if not re.fullmatch(rf"{kind}-[0-9a-f]{{24}}", given):
        raise missing(kind, given)
    return parent / given


def missing(kind: str, given: str) -> ApiError:
    """Nothing with this id is there, or it is somebody else's."""
    return ApiError(404, f"there is no {kind} {given[:60]!r}")


def read_record(path: Path, cls: type[Record]) -> Record | None:
    """The record at `path`; None where there is none or it is damaged."""
    try:
        return cls.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


@contextmanager
def directory_for(directory: Path) -> Iterator[Path]:
    """Make a directory for what the block writes into it; nothing of it is left where the block fails."""
    try:
        with full_disk_as_error():
            directory.mkdir(parents=True)
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


@contextmanager
def full_disk_as_error() -> Iterator[None]:
    """Answer a disk that is full, or gone, with a status."""
    try:
        yield
    except OSError as error:
        reason = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"
        raise ApiError(507, f"the server's state directory {reason}: nothing was kept of this request") from None
