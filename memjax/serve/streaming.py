"""Server-sent events, and clients that leave before the answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from memjax.serve.errors import CLIENT_GONE, ApiError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
COMMENT = b": still here\n\n"


def sse(data: Mapping[str, Any], *, event: str | None = None, event_id: int | None = None) -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    head += f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream of events that calls `close` however it ends, and ends when its reader takes longer than `limit` s."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        *,
        limit: float | None,
        headers: Mapping[str, str] | None = None,
    ):
        # nginx holds a stream back without the second header.
        headers = {**(headers or {}), "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close, self._limit = close, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            async with asyncio.timeout(self._limit):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("a reader of %s was too slow", scope["path"])
        finally:
            self._close()


async def started(
    request: Request,
    events: AsyncIterator[bytes],
    close: Callable[[], None],
    limit: float | None,
    headers: Mapping[str, str],
) -> EventStream:
    """The stream once its first event is there, so that what fails before it is still answered with a status."""
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        close()
        raise
    return EventStream(_guarded(first, events), close, limit=limit, headers=headers)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(_plain(work))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_GONE, "the client left")
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _plain(work: Awaitable[Result]) -> Result:
    return await work


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _guarded(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for event in rest:
            yield event
    except ApiError as error:  # the status is long sent
        yield sse(error.body())
