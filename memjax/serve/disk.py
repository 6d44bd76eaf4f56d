"""Directories of one owner, ids that name them, and records that are whole whatever happens."""

from __future__ import annotations

import errno
import os
import re
import secrets
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


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record so that a crash at any moment leaves either the one before or this one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(record.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_record(path: Path, cls: type[Record]) -> Record | None:
    """The record at `path`; None where there is none or it is damaged."""
    try:
        return cls.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


@contextmanager
def full_disk_as_error() -> Iterator[None]:
    """Answer a disk that is full, or gone, with a status."""
    try:
        yield
    except OSError as error:
        reason = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"
        raise ApiError(507, f"the server's state directory {reason}: nothing was kept of this request") from None
