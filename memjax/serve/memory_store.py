"""Runs on disk: each is a directory with its record, its documents and its journal."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from memjax.agents.registry import AnyAgent
from memjax.data.documents import Document, Series, inspected
from memjax.serve.disk import directory_for, directory_of, full_disk_as_error, make_id, missing, read_record
from memjax.serve.errors import ApiError
from memjax.trajectory import SamplingParams
from memjax.whole_file import write_whole

KIND = "run"

Status = Literal["reading", "stopped", "done", "failed"]
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
    model: str  # as the client called it
    questions: tuple[str, ...]
    documents: tuple[str, ...]  # their names
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
        with directory_for(self._directory(record)) as directory, full_disk_as_error():
            record = _with_documents(record, directory, documents)
            write_whole(directory / "run.json", record.model_dump_json())
        return record

    def get(self, owner: str, run_id: str) -> RunRecord:
        """The record; ApiError 404 for a run that is not there or not this owner's."""
        record = read_record(directory_of(self._root / owner, KIND, run_id) / "run.json", RunRecord)
        if record is None:
            raise missing(KIND, run_id)
        return self._held.get(run_id, record)

    def update(self, record: RunRecord, change: Callable[[RunRecord], RunRecord], *, hold: bool = False) -> RunRecord:
        """Change what is kept of a run, one change at a time.

        What a full disk does not take is an ApiError 507, or is held in memory with `hold`.
        """
        with self._lock:
            changed = change(self.get(record.owner, record.id)).model_copy(update={"updated": time.time()})
            try:
                with full_disk_as_error():
                    write_whole(self._directory(record) / "run.json", changed.model_dump_json())
            except ApiError:
                if not hold:
                    raise
                self._held[record.id] = changed
            else:
                self._held.pop(record.id, None)
        return changed

    def resume(self, record: RunRecord, documents: Documents = ()) -> RunRecord:
        """A run that is to be continued, with other documents after those that there are."""
        return self.update(record, lambda run: _with_documents(run, self._directory(run), documents))

    def list(self, owner: str | None = None) -> list[RunRecord]:
        """All runs of an owner, or of everybody, the latest first."""
        found = (read_record(path, RunRecord) for path in self._root.glob(f"{owner or '*'}/*/run.json"))
        return sorted((self._held.get(record.id, record) for record in found if record), key=lambda run: -run.created)

    def delete(self, record: RunRecord) -> None:
        """Forget a run."""
        with self._lock:
            self._held.pop(record.id, None)
            shutil.rmtree(self._directory(record), ignore_errors=True)

    def journal_path(self, record: RunRecord) -> Path:
        """Where the journal lies."""
        return self._directory(record) / "journal.jsonl"

    def documents(self, record: RunRecord) -> Series:
        """What is to be read. Looks into every document."""
        directory = self._directory(record)
        files = [inspected(_document_path(directory, number), name) for number, name in enumerate(record.documents)]
        return Series(tuple(Document((file,)) for file in files))

    def _directory(self, record: RunRecord) -> Path:
        return directory_of(self._root / record.owner, KIND, record.id)


def _document_path(directory: Path, number: int) -> Path:
    return directory / f"document-{number}"


def _with_documents(record: RunRecord, directory: Path, documents: Documents) -> RunRecord:
    for number, (_, path) in enumerate(documents, len(record.documents)):
        target = _document_path(directory, number)
        target.unlink(missing_ok=True)  # left by a request that a full disk failed
        os.link(path, target)
    names = (*record.documents, *(name for name, _ in documents))
    return record.model_copy(update={"documents": names, "status": "reading", "error": None})
