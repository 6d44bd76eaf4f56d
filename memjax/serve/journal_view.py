"""`memjax view`: the page of the server over one journal, for one person on this machine."""

from __future__ import annotations

import webbrowser
from collections import deque
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from memjax.episodes.journal import read_lines
from memjax.serve.listening import bind
from memjax.serve.web_page import page_routes

_HOST = "127.0.0.1"


def run_view(journal: Path, port: int, *, browser: bool) -> None:
    """Show a journal until Ctrl-C. ValueError for a file that is none, and a port in use."""
    check_journal(journal)
    listening = bind(_HOST, port)
    url = f"http://{_HOST}:{listening.getsockname()[1]}/"
    print(f"{url} shows {journal}; Ctrl-C ends it", flush=True)
    if browser:
        webbrowser.open(url)  # it waits at the socket until the next line
    uvicorn.Server(uvicorn.Config(create_view(journal), log_level="warning")).run(sockets=[listening])


def create_view(journal: Path) -> Starlette:
    """The application. The file is read at each visit, so a run under way grows with it."""

    async def content(_: Request) -> Response:
        return FileResponse(journal, media_type="application/jsonl", headers={"Cache-Control": "no-store"})

    async def start(_: Request) -> Response:
        return RedirectResponse("/journal")

    # A site that gives its own name this address could read the journal, but not under a name of this machine.
    named_here = Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    routes = [Route("/", start), Route("/journal.jsonl", content), *page_routes("/journal")]
    return Starlette(routes=routes, middleware=[named_here])


def check_journal(path: Path) -> None:
    """ValueError for what is not a journal, or a damaged one."""
    try:
        last = deque(read_lines(path), maxlen=1)
    except FileNotFoundError:
        raise ValueError(f"there is no journal {path}: memjax journal list shows those that there are") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a journal") from None
    if not last:
        raise ValueError(f"{path} is not a journal of memjax: it is empty")
