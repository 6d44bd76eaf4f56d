"""JetStream's gRPC Orchestrator over the shared scheduler.

JetStream's stock driver would need a decode state of its own beside the scheduler's (twice the cache) and its threads
would take turns with the scheduler's at one engine. So its service class, protocol and multi-future are used as they
are, and what stands in the driver's place hands requests to the scheduler. What the stock driver answers by killing its
process is here the failure of one request.
"""

from __future__ import annotations

import queue
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import grpc

from memjax.rollout.client import ClientError
from memjax.rollout.jetstream import load_orchestrator
from memjax.rollout.scheduler import TokenEvent
from memjax.serve.errors import ApiError
from memjax.serve.service import CHARACTERS, Generation, ModelService
from memjax.trajectory import Completion, SamplingParams

orchestrator = load_orchestrator()


class SchedulerDriver:
    """For one call, the two things that JetStream's service asks of a driver: `live`, and a place for requests.

    Replies are greedy, as with the stock driver; `max_tokens` is cut to what the window holds.
    """

    def __init__(self, service: ModelService):
        self._service = service
        self._generations: list[Generation] = []

    @property
    def live(self) -> bool:
        """Whether the engine works."""
        return self._service.failure is None

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Begin a request: queue.Full where too many wait, ValueError for what cannot be run, else ClientError."""
        content = request.prefill_content
        if len(content) > self._service.window * CHARACTERS:  # not even tokenised
            raise ValueError(f"the text has {len(content)} characters, and the window {self._service.window} tokens")
        ids = self._service.tokenizer.encode(content) if isinstance(content, str) else content
        room = self._service.window - len(ids)
        if request.max_tokens < 1 or room < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_tokens {request.max_tokens} cannot be run in a window of "
                f"{self._service.window}"
            )
        params = SamplingParams(max_tokens=min(request.max_tokens, room), temperature=0.0)
        channel = request.return_channel
        try:
            generation = self._service.start(ids, params, listener=lambda event: channel.add_result([_sample(event)]))
        except ApiError as error:
            raise _as_driver_error(error) from None
        self._generations.append(generation)
        generation.future.add_done_callback(lambda future: _finish(channel, future))

    async def close(self) -> None:
        """Count what is finished, and give back the slots of what is not."""
        for generation in self._generations:
            future = generation.future
            if future.done() and not future.cancelled() and future.exception() is None:
                await generation.result()
            generation.close()


class Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's service, with a status for what it would die of, and slots freed when a client leaves."""

    def __init__(self, service: ModelService, keys: Sequence[str]):
        super().__init__(SchedulerDriver(service))
        self._service, self._keys = service, tuple(keys)

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:  # noqa: N802 (JetStream's name)
        """Stream the reply to a text or to token ids."""
        await self._check_key(context)
        if request.WhichOneof("content") is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "give text_content or token_content")
        driver = SchedulerDriver(self._service)
        try:
            async for response in orchestrator.LLMOrchestrator(driver).Decode(request, context):
                yield response
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ClientError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except CancelledError:  # how the multi-future tells that the client left
            return
        finally:
            await driver.close()

    async def _check_key(self, context: Any) -> None:
        if not self._keys:
            return
        metadata = dict(context.invocation_metadata() or ())
        given = str(metadata.get("authorization", "")).removeprefix("Bearer ").encode()
        if not any(secrets.compare_digest(given, key.encode()) for key in self._keys):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the metadata authorization: Bearer KEY")


class GrpcServer:
    """The gRPC port, from `start` to `stop` in one event loop."""

    def __init__(self, service: ModelService, host: str, port: int, keys: Sequence[str]):
        self._service, self._host, self._keys = service, host, keys
        self.port = port
        """Where it listens; with 0 known after `start`."""

    async def start(self) -> None:
        """Listen. Raises ValueError where the port is in use."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = Orchestrator(self._service, self._keys)
        orchestrator.jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, self._server)
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{self.port}")
        except RuntimeError as error:
            raise ValueError(f"--grpc-port {self.port} cannot be listened on ({error})") from None
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no more requests, and wait for those under way."""
        await self._server.stop(grace)


def _sample(event: TokenEvent) -> Any:
    return orchestrator.ReturnSample(text=[event.text], token_ids=[event.token_id])


def _finish(channel: Any, future: Future[list[Completion]]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        channel.close()
    else:
        channel.set_exception(error)


def _as_driver_error(error: ApiError) -> Exception:
    if error.status == 429:
        return queue.Full()
    return ValueError(error.message) if error.status < 500 else ClientError(error.message)
