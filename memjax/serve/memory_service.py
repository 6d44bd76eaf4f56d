"""Readings as clients ask for them: what they may say, what is checked before anything is read, and what they see."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from memjax.ask import AskSettings, AskState, fitted
from memjax.serve.errors import ApiError, sentence
from memjax.serve.file_store import FileStore
from memjax.serve.memory_reader import MemoryReader, answer_event, chunk_event
from memjax.serve.memory_store import RunRecord
from memjax.serve.replies import check_model
from memjax.serve.schemas import Body, drawable
from memjax.serve.service import ModelService

MAX_QUESTIONS = 32
MAX_FILES = 100


class MemoryRequest(Body):
    """What to read and what to find out. The document is text, files uploaded before, or both in that order."""

    model: str | None = None
    text: str | None = None
    file_id: str | None = None
    file_ids: list[str] = Field(default=[], max_length=MAX_FILES)
    question: str | None = None
    questions: list[str] = Field(default=[], max_length=MAX_QUESTIONS)
    chunk_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    memory_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    answer_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    question_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    layout: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False

    @property
    def all_questions(self) -> tuple[str, ...]:
        """The one and the several."""
        return (*([self.question] if self.question is not None else []), *self.questions)

    @property
    def all_files(self) -> tuple[str, ...]:
        """The one and the several."""
        return (*([self.file_id] if self.file_id is not None else []), *self.file_ids)

    def settings(self) -> dict[str, Any]:
        """What was chosen of a reading's settings."""
        names = set(AskSettings.model_fields) & set(MemoryRequest.model_fields) - {"questions", "model"}
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.temperature is not None:
            chosen["temperature"] = drawable(self.temperature)
        return chosen | {"questions": self.all_questions}


class AppendRequest(Body):
    """What to read on: text, files uploaded before, or both in that order."""

    text: str | None = None
    file_ids: list[str] = Field(default=[], max_length=MAX_FILES)


class MemoryService:
    """Documents and readings of the served model, by owner."""

    def __init__(self, service: ModelService, files: FileStore, reader: MemoryReader, prompts: Path | None = None):
        self.service, self.files, self.reader = service, files, reader
        self._prompts = str(prompts) if prompts else None
        self.name = f"memory/{service.name}"

    def begin(self, owner: str, body: MemoryRequest) -> RunRecord:
        """Check everything that can be checked and begin to read. Blocks on the disk: call it in a thread."""
        check_model(body.model or self.name, self.name, self.service.name)
        self.service.refuse_unless_ready()
        self.reader.refuse_if_full()
        settings = self._settings(body)
        with _Documents(self.files, owner, body.text, body.all_files) as documents:
            record = self.reader.store.create(owner, self.name, self.reader.fingerprint, settings, documents)
        self.reader.start(record)
        return record

    def append(self, owner: str, run_id: str, body: AppendRequest) -> RunRecord:
        """Read on in other documents. Blocks on the disk."""
        self.service.refuse_unless_ready()
        record = self.reader.store.get(owner, run_id)
        if not self.reader.is_active(run_id):
            self.reader.refuse_if_full()
        with _Documents(self.files, owner, body.text, body.file_ids) as documents:
            for name, path in documents:
                record = self.reader.store.append(owner, run_id, name, path)
        self.reader.start(record)
        return record

    def resume(self, owner: str, run_id: str) -> RunRecord:
        """Go on with a reading that was stopped or failed. Blocks on the disk."""
        self.service.refuse_unless_ready()
        self.reader.refuse_if_full()
        record = self.reader.store.get(owner, run_id)
        if record.status in ("stopped", "failed"):
            record = self.reader.store.update(owner, run_id, _reading)
        if record.status == "reading":
            self.reader.start(record)
        return record

    def view(self, record: RunRecord) -> dict[str, Any]:
        """A reading as clients see it. Blocks on the disk."""
        state = self.reader.store.state(record)
        known = {name: getattr(record.settings, name) for name in _SHOWN_SETTINGS}
        return {
            "id": record.id,
            "object": "memory.run",
            "status": record.status,
            "error": record.error,
            "model": record.model,
            "created": record.created,
            "updated": record.updated,
            "documents": [part.name for part in record.parts],
            "questions": list(record.settings.questions),
            "settings": known,
            **_progress(state, record),
        }

    def _settings(self, body: MemoryRequest) -> AskSettings:
        chosen = body.settings()
        if not body.all_questions:
            raise ApiError(400, "no question: give question or questions")
        if len(body.all_questions) > MAX_QUESTIONS:
            raise ApiError(400, f"{len(body.all_questions)} questions are too many: {MAX_QUESTIONS} are the most")
        tokenizer, window = self.service.tokenizer, self.service.window
        try:
            settings = fitted(AskSettings(**chosen, prompts=self._prompts), set(chosen), tokenizer, window)
            agent = settings.memory_agent(tokenizer)
            for question in settings.questions:
                agent.check_window(question, window, self.service.name)
        except ValidationError as error:
            raise ApiError(400, sentence(dict(error.errors()[0]))) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return settings


class _Documents:
    """Names and paths of what is to be read, while it is copied: the text lies in a file of its own until then."""

    def __init__(self, files: FileStore, owner: str, text: str | None, file_ids: Sequence[str]):
        self._files, self._owner, self._text, self._file_ids = files, owner, text, file_ids
        self._own: str | None = None

    def __enter__(self) -> list[tuple[str, Path]]:
        if not self._text and not self._file_ids:
            raise ApiError(400, "no document: give text, file_id, or upload a file")
        found = [
            (self._files.get(self._owner, one).name, self._files.content(self._owner, one)) for one in self._file_ids
        ]
        if self._text:
            kept = self._files.add(self._owner, "text", io.BytesIO(self._text.encode()))
            self._own = kept.id
            found.insert(0, (kept.name, self._files.content(self._owner, kept.id)))
        return found

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._files.delete(self._owner, self._own)


_SHOWN_SETTINGS = (
    "chunk_tokens",
    "memory_tokens",
    "answer_tokens",
    "question_tokens",
    "layout",
    "temperature",
    "top_p",
    "seed",
)


def _progress(state: AskState | None, record: RunRecord) -> dict[str, Any]:
    if state is None:
        return {"chunks_read": 0, "tokens_read": 0, "memories": [], "answers": None}
    told = chunk_event(state, state.document_tokens, record.settings.chunk_tokens)
    answered = answer_event(state) if state.answers is not None and record.status == "done" else None
    return {
        "chunks_read": state.chunks_read,
        "tokens_read": state.document_tokens,
        "seconds": round(state.seconds, 3),
        "counters": dict(state.counters),
        "memories": told["memories"],
        "answers": answered["answers"] if answered else None,
    }


def _reading(record: RunRecord) -> RunRecord:
    return record.model_copy(update={"status": "reading", "error": None})
