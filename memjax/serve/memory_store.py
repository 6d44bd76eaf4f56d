"""Readings on disk: their documents, settings and states, and the events that their readers see."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from memjax.ask import AskSettings, AskState, load_state
from memjax.serve.disk import directory_for, directory_of, full_disk_as_error, make_id, missing, read_record
from memjax.whole_file import write_whole

KIND = "run"

Status = Literal["reading", "stopped", "done", "failed"]


class Part(BaseModel):
    """A document of a reading. Its chunks and tokens are known once it was read to its end."""

    model_config = ConfigDict(frozen=True)

    name: str
    chunks: int | None = None
    tokens: int = 0


class RunRecord(BaseModel):
    """A reading: one or several questions about documents, read one after another."""

    model_config = ConfigDict(frozen=True)

    id: str
    owner: str
    created: float
    updated: float
    status: Status
    model: str  # as the client called it
    fingerprint: str  # of the weights that it began with
    settings: AskSettings
    parts: tuple[Part, ...]
    error: str | None = None

    @property
    def unread(self) -> bool:
        """Whether a document is left that was not read to its end."""
        return any(part.chunks is None for part in self.parts)


class RunStore:
    """The readings under `root`, a directory for every owner. May be used from several threads."""

    def __init__(self, root: Path):
        self._root = root
        self._lock = threading.RLock()

    def create(
        self, owner: str, model: str, fingerprint: str, settings: AskSettings, documents: Sequence[tuple[str, Path]]
    ) -> RunRecord:
        """Keep a reading that is about to begin; `documents` are names and where their bytes lie now."""
        now = time.time()
        run_id = make_id(KIND)
        record = RunRecord(
            id=run_id,
            owner=owner,
            created=now,
            updated=now,
            status="reading",
            model=model,
            fingerprint=fingerprint,
            settings=settings,
            parts=tuple(Part(name=name) for name, _ in documents),
        )
        with directory_for(self.directory(owner, run_id)) as directory, full_disk_as_error():
            for number, (_, path) in enumerate(documents):
                os.link(path, part_path(directory, number))
            write_whole(directory / "run.json", record.model_dump_json())
        return record

    def get(self, owner: str, run_id: str) -> RunRecord:
        """The record; ApiError 404 for a reading that is not there or not this owner's."""
        record = read_record(self.directory(owner, run_id) / "run.json", RunRecord)
        if record is None:
            raise missing(KIND, run_id)
        return record

    def update(self, owner: str, run_id: str, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Change the record, one change at a time."""
        with self._lock:
            record = change(self.get(owner, run_id)).model_copy(update={"updated": time.time()})
            write_whole(self.directory(owner, run_id) / "run.json", record.model_dump_json())
        return record

    def append(self, owner: str, run_id: str, name: str, path: Path) -> RunRecord:
        """Another document, to be read after the others."""

        def add(record: RunRecord) -> RunRecord:
            os.link(path, part_path(self.directory(owner, run_id), len(record.parts)))
            parts = (*record.parts, Part(name=name))
            return record.model_copy(update={"parts": parts, "status": "reading", "error": None})

        with full_disk_as_error():
            return self.update(owner, run_id, add)

    def list(self, owner: str | None = None) -> list[RunRecord]:
        """All readings of an owner, or of everybody, the latest first."""
        found = (read_record(path, RunRecord) for path in self._root.glob(f"{owner or '*'}/*/run.json"))
        return sorted((record for record in found if record), key=lambda record: -record.created)

    def delete(self, owner: str, run_id: str) -> None:
        """Forget a reading."""
        shutil.rmtree(self.directory(owner, run_id), ignore_errors=True)

    def state(self, record: RunRecord) -> AskState | None:
        """How far the reading is; None before its first step."""
        path = self.state_path(record)
        return load_state(path) if path.exists() else None

    def state_path(self, record: RunRecord) -> Path:
        """Where the state lies."""
        return self.directory(record.owner, record.id) / "state.json"

    def trace_path(self, record: RunRecord) -> Path:
        """Where every prompt and reply lies, as `memjax ask --trace` writes them."""
        return self.directory(record.owner, record.id) / "trace.jsonl"

    def events(self, record: RunRecord, after: int = -1) -> Iterator[dict[str, Any]]:
        """What has happened since the event with that id."""
        path = self.events_path(record)
        if not path.exists():
            return
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n") and (event := json.loads(line))["id"] > after:
                    yield event

    def next_event_id(self, record: RunRecord) -> int:
        """The id of the event that comes next; the half of a line that a killed server left is taken away."""
        path = self.events_path(record)
        if not path.exists():
            return 0
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)
        return text.count(b"\n")  # every event is a line, and the first is 0

    def directory(self, owner: str, run_id: str) -> Path:
        """Where everything of a reading lies."""
        return directory_of(self._root / owner, KIND, run_id)

    def events_path(self, record: RunRecord) -> Path:
        """Where the events lie."""
        return self.directory(record.owner, record.id) / "events.jsonl"


def part_path(directory: Path, number: int) -> Path:
    """Where the bytes of a reading's document lie."""
    return directory / f"part-{number}"


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Write one more JSON line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
