"""/v1/memory/answers: documents of any length, read by an agent chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from memjax.serve.bodies import JsonRoute, json_body
from memjax.serve.errors import ApiError, invalid
from memjax.serve.memory_service import MemoryService
from memjax.serve.memory_store import RunRecord
from memjax.serve.replies import ignored_headers
from memjax.serve.schemas import MAX_FILES, AppendRequest, MemoryRequest
from memjax.serve.streaming import COMMENT, EventStream, sse, unless_gone
from memjax.serve.uploads import look_into

_FORM = {"file": {"type": "string", "format": "binary"}, "question": {"type": "string"}}
_BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": MemoryRequest.model_json_schema()},
            "multipart/form-data": {"schema": {"type": "object", "properties": _FORM}},
        },
    }
}


def memory_routes(memory: MemoryService) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute)

    async def found(request: Request, run_id: str) -> RunRecord:
        return await asyncio.to_thread(memory.store.get, request.state.owner, run_id)

    async def told(record: RunRecord, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse(await asyncio.to_thread(memory.view, record), status, headers)

    @router.post("/v1/memory/answers", openapi_extra=_BODIES, response_model=None)
    async def ask(request: Request) -> Response:
        """Read a document and answer questions about it: as events while it is read, or at once at the end."""
        body, brought = await _memory_request(request, memory)
        record = await asyncio.to_thread(memory.begin, request.state.owner, body, brought)
        headers = ignored_headers(body) | {"X-Memjax-Run": record.id}
        if body.stream:
            return _event_stream(memory, record, headers)
        record = await unless_gone(request, memory.reader.finished(record))
        as_asked = record.status in ("done", "stopped")
        return await told(record, 200 if as_asked else record.failed_with, headers)

    @router.get("/v1/memory/answers", response_model=None)
    async def listed(request: Request) -> Response:
        """The latest runs of this key."""
        records = await asyncio.to_thread(memory.store.list, request.state.owner)
        views = await asyncio.to_thread(lambda: [memory.view(record) for record in records[:100]])
        return JSONResponse({"object": "list", "data": views})

    @router.get("/v1/memory/answers/{run_id}", response_model=None)
    async def shown(run_id: str, request: Request) -> Response:
        """How far a run is, what it remembers, and its answers."""
        return await told(await found(request, run_id))

    @router.get("/v1/memory/answers/{run_id}/events", response_model=None)
    async def events(run_id: str, request: Request) -> Response:
        """The events from the start, or after the header Last-Event-ID, and those to come."""
        last = request.headers.get("last-event-id", "")
        after = int(last[:15]) if last.isdecimal() and last.isascii() else -1
        return _event_stream(memory, await found(request, run_id), {}, after)

    @router.get("/v1/memory/answers/{run_id}/journal", response_model=None)
    async def journal(run_id: str, request: Request) -> Response:
        """Every prompt and reply, a JSON line each: docs/journal.md describes them."""
        path = memory.store.journal_path(await found(request, run_id))
        if not path.exists():
            raise ApiError(404, "nothing was read yet: there is no journal")
        return FileResponse(path, media_type="application/jsonl", filename=f"{run_id}.jsonl")

    @router.post("/v1/memory/answers/{run_id}/append", response_model=None)
    async def append(run_id: str, body: AppendRequest, request: Request) -> Response:
        """Read on in other documents, and answer again; what was read before costs nothing."""
        record = await asyncio.to_thread(memory.append, request.state.owner, run_id, body)
        return await told(record, headers=ignored_headers(body))

    @router.post("/v1/memory/answers/{run_id}/stop", response_model=None)
    async def stop(run_id: str, request: Request) -> Response:
        """Stop reading; what was read is kept."""
        await memory.reader.stop(await found(request, run_id))
        return await told(await found(request, run_id))

    @router.post("/v1/memory/answers/{run_id}/resume", response_model=None)
    async def resume(run_id: str, request: Request) -> Response:
        """Continue a run that was stopped or failed."""
        return await told(await asyncio.to_thread(memory.resume, request.state.owner, run_id))

    @router.delete("/v1/memory/answers/{run_id}", response_model=None)
    async def deleted(run_id: str, request: Request) -> Response:
        """Forget a run and all it kept."""
        await memory.reader.forget(await found(request, run_id))
        return JSONResponse({"id": run_id, "object": "memory.run", "deleted": True})

    return router


def _event_stream(memory: MemoryService, record: RunRecord, headers: dict[str, str], after: int = -1) -> EventStream:
    async def events() -> AsyncIterator[bytes]:
        about = {"run": record.id, "documents": list(record.documents), "questions": list(record.questions)}
        yield sse({"type": "run", **about}, event="run")
        async for event in memory.reader.follow(record, after):
            yield COMMENT if event is None else sse(event, event=event["type"], event_id=event["id"])
        try:
            now = await asyncio.to_thread(memory.store.get, record.owner, record.id)
            status, error = await asyncio.to_thread(memory.standing, now)
        except ApiError as gone:  # it was deleted while it was followed
            status, error = "failed", gone.message
        yield sse({"type": "closed", "status": status, "error": error}, event="closed")

    return EventStream(events(), lambda: None, limit=None, headers=headers)


async def _memory_request(request: Request, memory: MemoryService) -> tuple[MemoryRequest, list[str]]:
    """The body, JSON or a form, and the ids of the documents that came with it."""
    try:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            return MemoryRequest.model_validate(await json_body(request)), []
        memory.service.refuse_unless_ready()
        async with request.form(max_files=MAX_FILES, max_fields=100) as form:
            return await _from_form(form, request, memory)
    except ValidationError as error:
        raise invalid(error.errors()[0]) from None


async def _from_form(form: FormData, request: Request, memory: MemoryService) -> tuple[MemoryRequest, list[str]]:
    owner = request.state.owner

    def texts(name: str) -> list[str]:
        return [value for value in form.getlist(name) if isinstance(value, str)]

    values: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
    values |= {"file_ids": texts("file_ids"), "questions": texts("question") + texts("questions"), "question": None}
    body = MemoryRequest.model_validate(values, strict=False)
    uploads = [file for file in form.getlist("file") if isinstance(file, UploadFile)]
    brought: list[str] = []
    try:
        for file in uploads:
            brought.append(await look_into(request, memory.bring, owner, file.filename or "document", file.file))
    except BaseException:
        memory.drop(owner, brought)
        raise
    return body, brought
