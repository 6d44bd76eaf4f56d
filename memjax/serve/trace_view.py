"""`memjax view`: the page of the server over one trace file, for one person on this machine."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from memjax.serve.listening import bind
from memjax.serve.web_page import page_routes

_HOST = "127.0.0.1"


def run_view(trace: Path, port: int, *, browser: bool) -> None:
    """Show a trace until Ctrl-C. ValueError for a file that is none, and a port in use."""
    check_trace(trace)
    listening = bind(_HOST, port)
    url = f"http://{_HOST}:{listening.getsockname()[1]}/"
    print(f"{url} shows {trace}; Ctrl-C ends it", flush=True)
    if browser:
        webbrowser.open(url)  # it waits at the socket until the next line
    uvicorn.Server(uvicorn.Config(create_view(trace), log_level="warning")).run(sockets=[listening])


def create_view(trace: Path) -> Starlette:
    """The application. The file is read at each visit, so a reading under way grows with it."""

    async def content(_: Request) -> Response:
        return FileResponse(trace, media_type="application/jsonl", headers={"Cache-Control": "no-store"})

    async def start(_: Request) -> Response:
        return RedirectResponse("/trace")

    # A site that gives its own name this address could read the trace, but not under a name of this machine.
    named_here = Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    routes = [Route("/", start), Route("/trace.jsonl", content), *page_routes("/trace")]
    return Starlette(routes=routes, middleware=[named_here])


def check_trace(path: Path) -> None:
    """ValueError for what `memjax ask --trace` did not write."""
    try:
        with open(path, encoding="utf-8") as lines:
            first = json.loads(next(lines, ""))
    except FileNotFoundError:
        raise ValueError(f"there is no trace {path}: memjax ask --trace {path} writes one") from None
    except (ValueError, OSError):
        first = None
    if not isinstance(first, dict) or not {"question", "reply", "memory"} <= first.keys():
        raise ValueError(f"{path} is no trace: memjax ask --trace writes them, and so does the page of memjax serve")
