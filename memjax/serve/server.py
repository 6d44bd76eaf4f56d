"""The process: one socket, one model, uvicorn, and what signals mean."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

import uvicorn
from fastapi import FastAPI

from memjax.data.parsing import EVERYBODY
from memjax.serve.app import Parts, create_app
from memjax.serve.backend import load_client
from memjax.serve.disk import make_private
from memjax.serve.errors import ApiError
from memjax.serve.gate import TimedHead
from memjax.serve.listening import BACKLOG, bind, raise_file_limit
from memjax.serve.settings import ServeSettings, keys_sentence
from memjax.whole_file import lock_directory

log = logging.getLogger(__name__)


def run_server(settings: ServeSettings, *, keys: Sequence[str] = (), admin_key: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError for a port in use, a model or a limit that cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # else it reports every backend that is not there
    # What is wrong with prompts is said before a model is loaded.
    log.info("agent %s with the prompts %s", settings.agent.name, settings.agent.prompt_hash)
    # So is a port, or a state directory, that another server has.
    with bind(settings.host, settings.port) as listening, hold_state(settings.state_dir.expanduser()):
        host, port = listening.getsockname()[:2]
        raise_file_limit()
        print(keys_sentence(keys, settings.host), flush=True)
        print(f"loading {settings.model}", flush=True)
        client = open_backend(settings)
        app = create_app(client, settings, keys=keys, admin_key=admin_key)
        name = app.state.parts.service.name
        print(f"http://{host}:{port} serves {name}; /ready says when it is warm", flush=True)
        Server(app, settings).run(sockets=[listening])


def hold_state(state_dir: Path) -> IO[str]:
    """The lock on a state directory, until it is closed; ValueError where it cannot be had.

    From here on all that this process writes is its owner's alone.
    """
    os.umask(0o077)
    try:
        make_private(state_dir)
        return lock_directory(state_dir, "stop that server, or give this one another --state-dir")
    except OSError as error:
        raise ValueError(
            f"the state directory {state_dir} cannot be used ({error.strerror}): give another --state-dir"
        ) from None


def open_backend(settings: ServeSettings) -> Backend:
    """One engine in this process, or several under Ray."""
    if settings.replicas == 1:
        return load_client(settings)
    try:
        from memjax.serve.replicas import ReplicaPool
    except ModuleNotFoundError:
        raise ValueError("--replicas needs Ray: uv sync --extra ray") from None
    return ReplicaPool(settings)


class Server(uvicorn.Server):
    """uvicorn, with an application that learns of a signal at once, and SIGHUP for other weights."""

    def __init__(self, app: FastAPI, settings: ServeSettings):
        protocol = type("Protocol", (TimedHead,), {"head_timeout": settings.body_timeout})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
            )
        )
        self._parts: Parts = app.state.parts

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        with suppress(ValueError, RuntimeError):  # not in the main thread, as in tests: signals are not for us
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse what comes, and let go of readers, who find their run again after the restart."""
        self._parts.service.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the runs, whose streams would never end by themselves, then wait for the rest."""
        self._parts.service.draining = True
        EVERYBODY.kill()
        await asyncio.to_thread(self._parts.reader.end_all)
        await super().shutdown(sockets)

    def _reload(self) -> None:
        task = asyncio.ensure_future(self._parts.reloader.swap(self._parts.reloader.source))
        task.add_done_callback(_log_swap)


def _log_swap(task: asyncio.Task[int]) -> None:
    error = task.exception()
    if isinstance(error, ApiError):
        log.error("the weights stay as they are: %s", error.message)
    elif error is not None:
        log.error("the weights stay as they are", exc_info=error)
    else:
        log.info("weights version %d is running", task.result())
