"""What those who run the server ask: is it alive, is it ready, how is it doing; and other weights while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from memjax.rollout.client import ClientError
from memjax.rollout.connect import LocalModel
from memjax.rollout.identity import ModelIdentity
from memjax.serve.bodies import JsonRoute
from memjax.serve.errors import ApiError
from memjax.serve.schemas import WeightsRequest
from memjax.serve.service import ModelService


class WeightReloader:
    """Where the weights come from, and the swap to those that lie there now; one swap at a time."""

    def __init__(
        self, service: ModelService, source: Path, dtype: str | None, on_swap: Callable[[ModelIdentity], None]
    ):
        self.source = source
        self._service, self._dtype, self._on_swap = service, dtype, on_swap
        self._lock = asyncio.Lock()

    async def swap(self, directory: Path, version: int | None = None) -> int:
        """Run the weights of another checkpoint of the same model from the next step on, and return their version.

        Requests under way go on. ApiError says why a checkpoint cannot be run.
        """
        try:
            found = directory.is_dir() or directory.is_file()
        except OSError as error:  # a name that is too long for the file system
            raise ApiError(400, f"directory: {error.strerror}") from None
        if not found:
            raise ApiError(400, f"there is no checkpoint {directory}")
        async with self._lock:
            last = self._service.client.weights_version
            if version is not None and version <= last:
                raise ApiError(
                    400, f"version is {version}, but {last} runs now: a version names one set of weights only"
                )
            try:
                identity = await asyncio.to_thread(LocalModel(str(directory)).identity, self._dtype)
                version = await self._service.client.load_weights(directory, version)
            except ValueError as error:
                raise ApiError(400, str(error)) from None
            except ClientError as error:
                raise ApiError(503, str(error)) from None
            self.source = directory
            self._on_swap(identity)
        return version


def operation_routes(service: ModelService, reloader: WeightReloader, max_body: int) -> APIRouter:
    """The routes; `max_body` is told to those who are about to send."""
    router = APIRouter(route_class=JsonRoute)
    begun = int(time.time())

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine works; 503 when it is dead and the server must be started again."""
        if service.failure:
            raise ApiError(503, service.failure)
        return JSONResponse({"status": "alive"})

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 when every program is compiled and requests are taken."""
        if service.failure:
            raise ApiError(503, service.failure)
        service.refuse_unless_ready()
        about = {"model": service.name, "window": service.window, "max_body": max_body}
        return JSONResponse({"status": "ready", **about})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The model, and the same model behind the memory loop."""
        return JSONResponse({"object": "list", "data": [_model(name, service, begun) for name in _names(service)]})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One of them."""
        if name not in _names(service):
            raise ApiError(404, f"there is no model {name[:100]!r}", code="model_not_found")
        return JSONResponse(_model(name, service, begun))

    @router.post("/admin/weights", response_model=None)
    async def weights(body: WeightsRequest) -> Response:
        """Swap the weights for those of a checkpoint directory on the server, while requests go on."""
        service.refuse_unless_ready()
        if "\0" in body.directory:
            raise ApiError(400, "directory: a path holds no NUL")
        return JSONResponse({"weights_version": await reloader.swap(Path(body.directory), body.version)})

    return router


def _names(service: ModelService) -> tuple[str, str]:
    return service.name, f"memory/{service.name}"


def _model(name: str, service: ModelService, begun: int) -> dict[str, str | int | None]:
    window = service.window if name == service.name else None  # the loop has no end
    return {"id": name, "object": "model", "created": begun, "owned_by": "memjax", "max_model_len": window}
