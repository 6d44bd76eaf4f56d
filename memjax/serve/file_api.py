"""/v1/files: documents that are kept to be asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import UploadFile

from memjax.serve.errors import ApiError
from memjax.serve.file_store import FileStore
from memjax.serve.uploads import look_into

_PURPOSES = ("user_data", "assistants", "batch", "fine-tune", "vision", "evals")
"""OpenAI's. Whatever it was sent for, a file here is a document to be asked about."""

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
                }
            }
        },
    }
}


def file_routes(files: FileStore, refuse: Callable[[], None]) -> APIRouter:
    """The routes; `refuse` raises ApiError while nothing can be taken."""
    router = APIRouter()

    @router.post("/v1/files", openapi_extra=_BODY, response_model=None)
    async def upload(request: Request) -> Response:
        """Keep a document: text, Markdown, HTML or PDF."""
        refuse()
        async with request.form(max_files=1, max_fields=10) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "no file: send it as the multipart field 'file'")
            purpose = form.get("purpose")
            name, kind = file.filename or "document", str(purpose or "user_data")
            if kind not in _PURPOSES:
                raise ApiError(
                    400, f"purpose must be one of {', '.join(_PURPOSES)}, got {kind[:40]!r}", param="purpose"
                )
            kept = await look_into(request, files.add, request.state.owner, name, file.file, kind)
        return JSONResponse(kept.view())

    @router.get("/v1/files", response_model=None)
    async def listed(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        purpose: str | None = None,
    ) -> Response:
        """The files of this key, the latest first: `limit` of them behind the file `after`, of one purpose or all."""
        records = await asyncio.to_thread(files.list, request.state.owner)
        records = records[::-1] if order == "asc" else records
        if after is not None:
            ids = [record.id for record in records]
            if after not in ids:
                raise ApiError(404, f"after: there is no file {after[:100]!r}", param="after")
            records = records[ids.index(after) + 1 :]
        records = [record for record in records if purpose in (None, record.purpose)]
        data = [record.view() for record in records[:limit]]
        page = {"object": "list", "data": data, "has_more": len(records) > limit}
        return JSONResponse(page | {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else page)

    @router.get("/v1/files/{file_id}/content", response_model=None)
    async def content(file_id: str, request: Request) -> Response:
        """The bytes of a file, as they were uploaded."""
        record = await asyncio.to_thread(files.get, request.state.owner, file_id)
        path = await asyncio.to_thread(files.content, request.state.owner, file_id)
        return FileResponse(path, media_type="application/octet-stream", filename=record.name)

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
