"""The page at /: plain files, served with a policy under which nothing but them can run."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi.responses import FileResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_DIRECTORY = Path(__file__).parent / "page"

POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again by its tag, so that no page meets the parts of another version
}


def page_routes(path: str = "/") -> list[BaseRoute]:
    """The page at `path`, and what it is made of under /page/."""
    return [Route(path, _index, include_in_schema=False), Mount("/page", _PageFiles(directory=_DIRECTORY))]


async def _index(_: Request) -> Response:
    return FileResponse(_DIRECTORY / "index.html", headers=POLICY)


class _PageFiles(StaticFiles):
    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(POLICY)
        return response
