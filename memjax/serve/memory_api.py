"""/v1/files and /v1/memory/answers: documents of any length, read in chunks with a bounded memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from memjax.ask import AskSettings, AskState, fitted
from memjax.serve.errors import ApiError, sentence
from memjax.serve.file_store import FileStore
from memjax.serve.memory_reader import MemoryReader, answer_event, chunk_event
from memjax.serve.memory_store import RunRecord
from memjax.serve.replies import check_model, ignored_headers
from memjax.serve.schemas import Request as RequestBody
from memjax.serve.schemas import drawable
from memjax.serve.service import ModelService
from memjax.serve.streaming import COMMENT, EventStream, sse, unless_gone

MAX_QUESTIONS = 32
MAX_FILES = 100


class MemoryRequest(RequestBody):
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


class AppendRequest(RequestBody):
    """What to read on: text, files uploaded before, or both in that order."""

    text: str | None = None
    file_ids: list[str] = Field(default=[], max_length=MAX_FILES)


_BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": MemoryRequest.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "question": {"type": "string"},
                    },
                }
            },
        },
    }
}


class MemoryService:
    """Documents and readings of the served model, by owner."""

    def __init__(self, service: ModelService, files: FileStore, reader: MemoryReader):
        self.service, self.files, self.reader = service, files, reader
        self.name = f"memory/{service.name}"

    def begin(self, owner: str, body: MemoryRequest) -> RunRecord:
        """Check everything that can be checked and begin to read. Blocks on the disk: call it in a thread."""
        check_model(body.model or self.name, self.name, self.service.name)
        self.service.refuse_unless_ready()
        self.reader.refuse_if_full()
        settings = self._settings(body)
        with self._documents(owner, body.text, body.all_files) as documents:
            record = self.reader.store.create(owner, self.name, self.reader.fingerprint, settings, documents)
        self.reader.start(record)
        return record

    def append(self, owner: str, run_id: str, body: AppendRequest) -> RunRecord:
        """Read on in other documents. Blocks on the disk."""
        self.service.refuse_unless_ready()
        record = self.reader.store.get(owner, run_id)
        with self._documents(owner, body.text, body.file_ids) as documents:
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
            settings = fitted(AskSettings(**chosen), set(chosen), tokenizer, window)
            agent = settings.memory_agent(tokenizer)
            for question in settings.questions:
                agent.check_window(question, window, self.service.name)
        except ValidationError as error:
            raise ApiError(400, sentence(dict(error.errors()[0]))) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return settings

    def _documents(self, owner: str, text: str | None, file_ids: Any) -> _Documents:
        return _Documents(self.files, owner, text, tuple(file_ids))


class _Documents:
    """Names and paths of what is to be read, while it is copied: the text lies in a file of its own until then."""

    def __init__(self, files: FileStore, owner: str, text: str | None, file_ids: tuple[str, ...]):
        self._files, self._owner, self._text, self._file_ids = files, owner, text, file_ids
        self._own: str | None = None

    def __enter__(self) -> list[tuple[str, Any]]:
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


def file_routes(files: FileStore, refuse: Callable[[], None]) -> APIRouter:
    """/v1/files."""
    router = APIRouter()
    upload_body = {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "purpose": {"type": "string"},
                        },
                    }
                }
            },
        }
    }

    @router.post("/v1/files", openapi_extra=upload_body, response_model=None)
    async def upload(request: Request) -> Response:
        """Keep a document: text, Markdown, HTML or PDF."""
        refuse()
        async with request.form(max_files=1, max_fields=10) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "no file: send it as the multipart field 'file'")
            purpose = form.get("purpose")
            kept = await asyncio.to_thread(
                files.add, request.state.owner, file.filename or "document", file.file, str(purpose or "user_data")
            )
        return JSONResponse(kept.view())

    @router.get("/v1/files", response_model=None)
    async def listed(request: Request) -> Response:
        """All files of this key."""
        records = await asyncio.to_thread(files.list, request.state.owner)
        return JSONResponse({"object": "list", "data": [record.view() for record in records], "has_more": False})

    @router.get("/v1/files/{file_id}", response_model=None)
    async def shown(file_id: str, request: Request) -> Response:
        """What is known of a file."""
        return JSONResponse((await asyncio.to_thread(files.get, request.state.owner, file_id)).view())

    @router.delete("/v1/files/{file_id}", response_model=None)
    async def deleted(file_id: str, request: Request) -> Response:
        """Forget a file."""
        await asyncio.to_thread(files.delete, request.state.owner, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


def memory_routes(memory: MemoryService) -> APIRouter:
    """/v1/memory/answers."""
    router = APIRouter()
    store = memory.reader.store

    @router.post("/v1/memory/answers", openapi_extra=_BODIES, response_model=None)
    async def ask(request: Request) -> Response:
        """Read a document and answer questions about it: as events while it is read, or in one piece at the end."""
        body = await _memory_request(request, memory)
        record = await asyncio.to_thread(memory.begin, request.state.owner, body)
        headers = ignored_headers(body) | {"X-Memjax-Run": record.id}
        if body.stream:
            return _event_stream(memory, record, headers)
        record = await unless_gone(request, memory.reader.finished(record))
        status = 200 if record.status != "failed" else 503
        return JSONResponse(await asyncio.to_thread(memory.view, record), status, headers=headers)

    @router.get("/v1/memory/answers", response_model=None)
    async def listed(request: Request) -> Response:
        """All readings of this key, the latest first."""
        records = await asyncio.to_thread(store.list, request.state.owner)
        views = await asyncio.to_thread(lambda: [memory.view(record) for record in records[:100]])
        return JSONResponse({"object": "list", "data": views})

    @router.get("/v1/memory/answers/{run_id}", response_model=None)
    async def shown(run_id: str, request: Request) -> Response:
        """How far a reading is, what it remembers, and its answers."""
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        return JSONResponse(await asyncio.to_thread(memory.view, record))

    @router.get("/v1/memory/answers/{run_id}/events", response_model=None)
    async def events(run_id: str, request: Request) -> Response:
        """The events from the start, or after the header Last-Event-ID, and those to come."""
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        last = request.headers.get("last-event-id", "")
        return _event_stream(memory, record, {}, int(last[:15]) if last.isdecimal() and last.isascii() else -1)

    @router.get("/v1/memory/answers/{run_id}/trace", response_model=None)
    async def trace(run_id: str, request: Request) -> Response:
        """Every prompt and reply, a JSON line each, as `memjax ask --trace` writes them."""
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        path = store.trace_path(record)
        if not path.exists():
            raise ApiError(404, "nothing was read yet: there is no trace")
        return FileResponse(path, media_type="application/jsonl", filename=f"{record.id}.jsonl")

    @router.post("/v1/memory/answers/{run_id}/append", response_model=None)
    async def append(run_id: str, body: AppendRequest, request: Request) -> Response:
        """Read on in other documents from the memory that there is, and answer again."""
        record = await asyncio.to_thread(memory.append, request.state.owner, run_id, body)
        return JSONResponse(await asyncio.to_thread(memory.view, record), headers=ignored_headers(body))

    @router.post("/v1/memory/answers/{run_id}/stop", response_model=None)
    async def stop(run_id: str, request: Request) -> Response:
        """Stop reading; what was read is kept."""
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        await memory.reader.stop(record)
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        return JSONResponse(await asyncio.to_thread(memory.view, record))

    @router.post("/v1/memory/answers/{run_id}/resume", response_model=None)
    async def resume(run_id: str, request: Request) -> Response:
        """Go on with a reading that was stopped or failed."""
        record = await asyncio.to_thread(memory.resume, request.state.owner, run_id)
        return JSONResponse(await asyncio.to_thread(memory.view, record))

    @router.delete("/v1/memory/answers/{run_id}", response_model=None)
    async def deleted(run_id: str, request: Request) -> Response:
        """Forget a reading and all it kept."""
        record = await asyncio.to_thread(store.get, request.state.owner, run_id)
        await memory.reader.forget(record)
        return JSONResponse({"id": run_id, "object": "memory.run", "deleted": True})

    return router


def _event_stream(memory: MemoryService, record: RunRecord, headers: dict[str, str], after: int = -1) -> EventStream:
    async def events() -> AsyncIterator[bytes]:
        begun = {"type": "run", "run": record.id, "documents": [part.name for part in record.parts]}
        yield sse(begun | {"questions": list(record.settings.questions)}, event="run")
        async for event in memory.reader.follow(record, after):
            yield COMMENT if event is None else sse(event, event=event["type"], event_id=event["id"])
        state = await asyncio.to_thread(memory.reader.store.get, record.owner, record.id)
        yield sse({"type": "end", "status": state.status, "error": state.error}, event="end")

    return EventStream(events(), lambda: None, limit=None, headers=headers)


async def _memory_request(request: Request, memory: MemoryService) -> MemoryRequest:
    """The body, JSON or a form; the files of a form are kept first."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        memory.service.refuse_unless_ready()
        async with request.form(max_files=MAX_FILES, max_fields=100) as form:
            return await _from_form(form, request.state.owner, memory.files)
    try:
        return MemoryRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise ApiError(400, sentence(dict(error.errors()[0]))) from None


async def _from_form(form: FormData, owner: str, files: FileStore) -> MemoryRequest:
    uploads = [file for file in form.getlist("file") if isinstance(file, UploadFile)]
    values: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
    for name in ("file_ids", "questions"):
        values[name] = [value for value in form.getlist(name) if isinstance(value, str)]
    asked = [value for value in form.getlist("question") if isinstance(value, str)]
    values["questions"] = [*asked, *values["questions"]]
    values.pop("question", None)
    try:
        body = MemoryRequest.model_validate(values, strict=False)
    except ValidationError as error:
        raise ApiError(400, sentence(dict(error.errors()[0]))) from None
    kept = [(await asyncio.to_thread(files.add, owner, file.filename or "document", file.file)).id for file in uploads]
    return body.model_copy(update={"file_ids": [*body.file_ids, *kept]})
