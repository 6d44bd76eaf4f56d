"""/v1/files and /v1/memory/answers: documents of any length, read in chunks with a bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from memjax.serve.errors import ApiError, sentence
from memjax.serve.file_store import FileStore
from memjax.serve.memory_service import MAX_FILES, AppendRequest, MemoryRequest, MemoryService
from memjax.serve.memory_store import RunRecord
from memjax.serve.replies import ignored_headers
from memjax.serve.streaming import COMMENT, EventStream, sse, unless_gone

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
