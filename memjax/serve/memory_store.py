"""Runs on disk: each is a directory with its record, its documents and its journal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from memjax.agents.registry import DEFAULT, AnyAgent
from memjax.data.documents import Document, Series, inspected
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
from memjax.trajectory import SamplingParams
from memjax.whole_file import write_whole

KIND = "run"

Status = Literal["reading", "stopped", "done", "failed", "damaged"]
Documents = Sequence[tuple[str, Path]]
"""Names, and where the bytes lie until a run has links to them of its own."""


class RunRecord(BaseModel):
    """A run: one or several questions about documents, which are read one after another."""

    model_config = ConfigDict(frozen=True)

    id: str
    owner: str
    created: float
    updated: float
    status: Status = "reading"
    error: str | None = None
    failed_with: int = 503  # the status of the request that waits for a run which fails
    model: str  # as the client called it
    questions: tuple[str, ...]
    documents: tuple[str, ...]  # their names
    sizes: tuple[int, ...] = ()  # of each document, in bytes
    warnings: tuple[str, ...] = ()  # of parts of them that could not be read
    agent: AnyAgent
    sampling: SamplingParams


class RunStore:
    """The runs under `root`, a directory for every owner. May be used from several threads."""

    def __init__(self, root: Path):
        self._root = root
        self._lock = threading.RLock()
        self._held: dict[str, RunRecord] = {}  # what a full disk did not take

    def create(self, owner: str, documents: Documents, **asked: Any) -> RunRecord:
        """Keep a run that is about to begin: what was asked, by the fields of a record."""
        about = {"id": make_id(KIND), "owner": owner, "created": time.time(), "updated": time.time(), "documents": ()}
        record = RunRecord.model_validate(about | asked)
        with directory_for(self._root / owner / record.id) as directory, full_disk_as_error():
            record = _with_documents(record, directory, documents)
            write_whole(directory / "run.json", record.model_dump_json())
        return record

    def get(self, owner: str, run_id: str) -> RunRecord:
        """The record, of a damaged run too; ApiError 404 for a run that is not there or not this owner's."""
        directory = directory_of(self._root / owner, KIND, run_id)
        touch(directory)
        return self._read(directory)

    def update(self, record: RunRecord, change: Callable[[RunRecord], RunRecord], *, hold: bool = False) -> RunRecord:
        """Change what is kept of a run, one change at a time.

        What a full disk does not take is an ApiError 507, or is held in memory with `hold`. A damaged run is an
        ApiError 409.
        """
        with self._lock:
            known = self.get(record.owner, record.id)
            if known.status == "damaged":
                raise ApiError(409, known.error or "")
            with full_disk_as_error():
                changed = change(known)
            if changed is known:
                return known
            changed = changed.model_copy(update={"updated": time.time()})
            try:
                self._write(changed)
            except ApiError:
                if not hold:
                    raise
                self._held[record.id] = changed
        return changed

    def is_held(self, record: RunRecord) -> bool:
        """Whether the disk did not take the last change of a run."""
        return record.id in self._held

    def write_held(self) -> None:
        """Write what the disk did not take, where it has room again."""
        with self._lock:
            for record in list(self._held.values()):
                with suppress(ApiError):
                    self._write(record)

    def resume(self, record: RunRecord, documents: Documents = ()) -> RunRecord:
        """A run that is to be continued, with other documents after those that there are."""
        return self.update(record, lambda run: _with_documents(run, self._directory(run), documents))

    def list(self, owner: str | None = None) -> list[RunRecord]:
        """All runs of an owner, or of everybody, the latest first; damaged ones are among them."""
        return sorted(map(self._read, directories(self._root, KIND, owner or "*")), key=lambda run: -run.created)

    def delete(self, record: RunRecord) -> None:
        """Forget a run."""
        with self._lock:
            self._held.pop(record.id, None)
            remove(self._root / record.owner / record.id)

    def sweep(self, before: float, under_way: Container[str]) -> None:
        """Forget what was last used before that time, but no run under way."""
        found = [path for path in directories(self._root, KIND) if path.name not in under_way]
        sweep(found, before)

    def journal_path(self, record: RunRecord) -> Path:
        """Where the journal lies."""
        return self._root / record.owner / record.id / "journal.jsonl"

    def kept(self, record: RunRecord) -> Documents:
        """The names of a run's documents, and where their bytes lie: another run may link to them."""
        directory = self._directory(record)
        return [(name, _document_path(directory, number)) for number, name in enumerate(record.documents)]

    def documents(self, record: RunRecord) -> Series:
        """What is to be read. Looks into every document."""
        files = [inspected(path, name) for name, path in self.kept(record)]
        return Series(tuple(Document((file,)) for file in files))

    def _read(self, directory: Path) -> RunRecord:
        record = None
        try:
            record = read_record(directory / "run.json", RunRecord)
            if (record.owner, record.id) != (directory.parent.name, directory.name) or not record.questions:
                record = None
                raise DamagedError("its record is that of another run")
            sizes = tuple(_size(_document_path(directory, number)) for number in range(len(record.documents)))
            if sizes != record.sizes:
                raise DamagedError("a document of it is missing or is not as it was")
        except DamagedError as error:
            told = f"this run is damaged, {error}: delete it and begin it again"
            return (record or _unknown(directory)).model_copy(update={"status": "damaged", "error": told})
        return self._held.get(record.id, record)

    def _write(self, record: RunRecord) -> None:
        with full_disk_as_error():
            write_whole(self._directory(record) / "run.json", record.model_dump_json())
        self._held.pop(record.id, None)

    def _directory(self, record: RunRecord) -> Path:
        return directory_of(self._root / record.owner, KIND, record.id)


def _document_path(directory: Path, number: int) -> Path:
    return directory / f"document-{number}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _unknown(directory: Path) -> RunRecord:
    """What stands for the record of a run that cannot be read."""
    since = min(kept_since(directory), time.time())
    about = {"id": directory.name, "owner": directory.parent.name, "created": since, "updated": since}
    asked = {"model": "", "questions": (), "documents": (), "agent": DEFAULT, "sampling": SamplingParams()}
    return RunRecord.model_validate(about | asked)


def _with_documents(record: RunRecord, directory: Path, documents: Documents) -> RunRecord:
    sizes = list(record.sizes)
    for number, (_, path) in enumerate(documents, len(record.documents)):
        target = _document_path(directory, number)
        target.unlink(missing_ok=True)  # left by a request that a full disk failed
        os.link(path, target)
        sizes.append(target.stat().st_size)
    names = (*record.documents, *(name for name, _ in documents))
    changed = {"documents": names, "sizes": tuple(sizes), "status": "reading", "error": None, "failed_with": 503}
    return record.model_copy(update=changed)
