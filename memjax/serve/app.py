"""The HTTP application: its parts, its routes, and what runs from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from memjax import __version__
from memjax.rollout.connect import LocalModel
from memjax.serve.backend import Backend
from memjax.serve.chat import chat_routes
from memjax.serve.completions import completion_routes
from memjax.serve.disk import last_used, open_state, size_of
from memjax.serve.errors import install_handlers
from memjax.serve.file_api import file_routes
from memjax.serve.file_store import FileStore
from memjax.serve.gate import Gate, LoopLag, Pages
from memjax.serve.memory_api import memory_routes
from memjax.serve.memory_chat import MemoryChat
from memjax.serve.memory_reader import MemoryReader
from memjax.serve.memory_service import MemoryService
from memjax.serve.memory_store import RunStore
from memjax.serve.metrics import Metrics, Reading
from memjax.serve.native import native_routes
from memjax.serve.operation import WeightReloader, operation_routes
from memjax.serve.service import ModelService
from memjax.serve.settings import ServeSettings
from memjax.serve.trusted_clock import DAY, TrustedClock, steady_seconds
from memjax.serve.web_page import page_routes

if TYPE_CHECKING:
    from memjax.serve.jetstream_grpc import GrpcServer

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 600.0
_VALUES = 50_000  # of a JSON body, and as many more as two windows have token ids


@dataclass(frozen=True)
class Parts:
    """What the application is made of."""

    service: ModelService
    memory: MemoryService
    files: FileStore
    brought: FileStore
    runs: RunStore
    reader: MemoryReader
    reloader: WeightReloader
    grpc: GrpcServer | None
    lag: LoopLag


def create_app(
    client: Backend, settings: ServeSettings, *, keys: Sequence[str] = (), admin_key: str | None = None
) -> FastAPI:
    """The application over a client, which it warms up when it starts and closes when it ends."""
    parts = _make_parts(client, settings, keys)
    app = FastAPI(
        title="memjax",
        version=__version__,
        description="A model behind OpenAI's interface, and one that reads documents of any length.",
        docs_url=None,  # they come from a content network; the page and docs/serving.md explain
        redoc_url=None,
        lifespan=lambda _: _running(parts, settings),
    )
    app.state.parts = parts
    install_handlers(app)
    memory = parts.memory
    app.include_router(chat_routes(parts.service, MemoryChat(memory)))
    app.include_router(completion_routes(parts.service))
    app.include_router(native_routes(parts.service))
    app.include_router(file_routes(parts.files, parts.service.refuse_unless_ready))
    app.include_router(memory_routes(memory))
    app.include_router(operation_routes(parts.service, parts.reloader, settings.max_body))
    app.router.routes.extend(page_routes())
    app.add_middleware(
        Gate,
        keys=keys,
        admin_key=admin_key,
        pages=Pages(open_to_all=not keys, host=settings.host, allowed=settings.allowed_hosts),
        max_body=settings.max_body,
        max_values=_VALUES + 2 * client.window,
        body_timeout=settings.body_timeout,
        metrics=parts.service.metrics,
        lag=lambda: parts.lag.seconds,
    )
    return app


def _make_parts(client: Backend, settings: ServeSettings, keys: Sequence[str]) -> Parts:
    metrics = Metrics()
    service = ModelService(
        client,
        metrics,
        name=settings.served_name or client.model.removesuffix(".gguf"),
        max_queue=settings.max_queue,
        max_share=settings.max_share if len(keys) > 1 else 1.0,
        request_timeout=settings.request_timeout,
    )
    state_dir = settings.state_dir.expanduser()
    runs = RunStore(state_dir / "runs")
    files, brought = (FileStore(state_dir / name) for name in ("files", "brought"))
    identity = LocalModel(settings.model).identity(settings.dtype)
    most = settings.max_runs
    of_one = max(1, int(most * settings.max_share)) if len(keys) > 1 else most
    reader = MemoryReader(runs, client, identity=identity, max_runs=most, max_runs_per_owner=of_one)
    memory = MemoryService(service, files, brought, reader, settings.agent)
    reloader = WeightReloader(service, Path(settings.model), settings.dtype, reader.change_model)
    metrics.watch(
        [
            Reading("memjax_memory_runs", "Documents being read.", lambda: len(reader.tasks)),
            Reading("memjax_state_bytes", "Bytes of the state directory.", lambda: size_of(state_dir)),
        ]
    )
    grpc = None
    if settings.grpc_port is not None:
        from memjax.serve.jetstream_grpc import GrpcServer  # seconds, and JetStream, which HTTP does without

        grpc = GrpcServer(service, settings.host, settings.grpc_port, keys)
    return Parts(service, memory, files, brought, runs, reader, reloader, grpc, LoopLag())


@asynccontextmanager
async def _running(parts: Parts, settings: ServeSettings) -> AsyncIterator[None]:
    service = parts.service
    await asyncio.to_thread(open_state, settings.state_dir.expanduser())
    work = (_warm_up(parts), _sweep(parts, settings), parts.lag.watch())
    tasks = [asyncio.create_task(one) for one in work]
    if parts.grpc:
        await parts.grpc.start()
    try:
        yield
    finally:
        service.draining = True
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(parts.reader.close)
        if parts.grpc:
            await parts.grpc.stop(settings.drain_seconds)
        await service.client.close()


async def _warm_up(parts: Parts) -> None:
    """Compile everything, then take requests and continue the runs that a restart interrupted."""
    started = time.monotonic()
    await asyncio.to_thread(parts.service.client.warm_up)
    parts.service.ready = True
    log.info("ready after %.1f s of compiling", time.monotonic() - started)
    await asyncio.to_thread(parts.reader.resume_all)


async def _sweep(parts: Parts, settings: ServeSettings) -> None:
    """Say what is damaged; then forget now and then what nobody has used for so long."""
    for problem in await asyncio.to_thread(lambda: list(parts.memory.problems())):
        log.warning("%s", problem)
    seconds, seen = settings.run_hours * 3600, settings.state_dir.expanduser() / ".clock"
    clock = TrustedClock(min(last_used(seen), time.time()), min(DAY, seconds))
    while True:
        if clock.is_trusted(time.time(), steady_seconds()):
            await asyncio.to_thread(expire, parts, time.time() - seconds)
            with suppress(OSError):
                seen.touch(mode=0o600)
        await asyncio.to_thread(parts.runs.write_held)
        await asyncio.sleep(_SWEEP_SECONDS)


def expire(parts: Parts, before: float) -> None:
    """Forget files, and runs that are not under way, last used before that time."""
    parts.files.sweep(before)
    parts.brought.sweep(before)
    parts.runs.sweep(before, parts.reader.tasks)
