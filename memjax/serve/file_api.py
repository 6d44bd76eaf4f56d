"""/v1/files: documents that are kept to be asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from memjax.serve.errors import ApiError
from memjax.serve.file_store import FileStore
from memjax.serve.uploads import look_into

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
            kept = await look_into(request, files.add, request.state.owner, name, file.file, kind)
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
