"""Uploaded documents on disk, each under an id of the server's making; their names are only ever text in a record."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from memjax.data.documents import inspected
from memjax.serve.disk import (
    DamagedError,
    directories,
    directory_for,
    directory_of,
    full_disk_as_error,
    kept_since,
    make_id,
    read_record,
    remove,
    sweep,
    touch,
)
from memjax.serve.errors import ApiError
from memjax.whole_file import write_whole

KIND = "file"


class FileRecord(BaseModel):
    """An uploaded file."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str  # as the client called it
    size: int  # bytes
    created: float  # seconds since 1970
    purpose: str = "user_data"
    warnings: tuple[str, ...] = ()  # of parts that could not be read
    damage: str | None = None  # why it cannot be used

    def view(self) -> dict[str, Any]:
        """As OpenAI shows it, but for the status of a file that is damaged."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "damaged" if self.damage else "processed",
            "status_details": self.damage,
            "warnings": list(self.warnings),
        }


class FileStore:
    """The files under `root`, a directory for every owner."""

    def __init__(self, root: Path):
        self._root = root

    def add(self, owner: str, name: str, content: BinaryIO, purpose: str = "user_data") -> FileRecord:
        """Keep a document; ApiError for what is no readable text."""
        file_id = make_id(KIND)
        shown = shown_name(name)
        with directory_for(self._root / owner / file_id) as directory:
            with full_disk_as_error(), open(directory / "content", "wb") as kept:
                shutil.copyfileobj(content, kept)
            warnings = check_document(directory / "content", shown)
            size = (directory / "content").stat().st_size
            record = FileRecord(
                id=file_id, name=shown, size=size, created=time.time(), purpose=purpose[:64], warnings=warnings
            )
            with full_disk_as_error():
                write_whole(directory / "file.json", record.model_dump_json())
        return record

    def get(self, owner: str, file_id: str) -> FileRecord:
        """The record of a file; ApiError 404 for anything else."""
        directory = self._directory(owner, file_id)
        touch(directory)
        return _read(directory)

    def content(self, owner: str, file_id: str) -> Path:
        """Where the bytes lie; ApiError 409 for a damaged file."""
        if damage := self.get(owner, file_id).damage:
            raise ApiError(409, damage)
        return self._directory(owner, file_id) / "content"

    def list(self, owner: str = "*") -> list[FileRecord]:
        """All files of an owner, or of everybody, the latest first; damaged ones are among them."""
        return sorted(map(_read, directories(self._root, KIND, owner)), key=lambda record: -record.created)

    def delete(self, owner: str, file_id: str) -> None:
        """Forget a file; runs that began with it have their own copy."""
        remove(self._directory(owner, file_id))

    def sweep(self, before: float) -> None:
        """Forget what was last used before that time."""
        sweep(directories(self._root, KIND), before)

    def _directory(self, owner: str, file_id: str) -> Path:
        return directory_of(self._root / owner, KIND, file_id)


def _read(directory: Path) -> FileRecord:
    try:
        record = read_record(directory / "file.json", FileRecord)
        if record.id != directory.name or record.size != _size(directory / "content"):
            raise DamagedError("its content is missing or is not what was uploaded")
    except DamagedError as error:
        told = f"this file is damaged, {error}: delete it and upload it again"
        created, size = min(kept_since(directory), time.time()), _size(directory / "content") or 0
        return FileRecord(id=directory.name, name="", size=size, created=created, damage=told)
    return record


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def shown_name(name: str) -> str:
    """The last part of a name that a client gave, for people and to tell its kind by."""
    printable = "".join(char for char in name if char.isprintable())
    return printable.replace("\\", "/").rstrip("/").rpartition("/")[2][-200:] or "document"


def check_document(path: Path, name: str) -> tuple[str, ...]:
    """What could not be read of a file; ApiError 400 for one that is no readable text."""
    with open(path, "rb") as raw:
        if raw.read(2) == b"\x1f\x8b":  # a small packed file may hold terabytes
            raise ApiError(400, f"{name} is packed: unpack it before you send it")
    try:
        return inspected(path, name).notes
    except ValueError as error:
        raise ApiError(400, str(error)) from None
