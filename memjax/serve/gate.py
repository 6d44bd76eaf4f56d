"""What every HTTP request passes: its key, the size of its body and the time that it takes to arrive."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from memjax.serve.errors import ApiError
from memjax.serve.metrics import Metrics

_SLOWEST_BODY = 10_000  # bytes per second

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""What needs no key."""

PAGE_PREFIX = "/page/"
"""Nor does what the page at / is made of."""

PUBLIC = "public"
"""The owner of everything on a server without keys."""


def owner_of(key: str) -> str:
    """The name under which the files and readings of a key lie on disk."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Gate:
    """Lets through, to `app`, what has a key and arrives whole in time. The owner is in `request.state.owner`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        admin_key: str | None,
        max_body: int,
        body_timeout: float,
        metrics: Metrics,
    ):
        self._app, self._keys, self._admin_key = app, tuple(keys), admin_key
        self._max_body, self._body_timeout, self._metrics = max_body, body_timeout, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            scope.setdefault("state", {})["owner"] = self._owner(scope["path"], headers)
            self._refuse_long(headers)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        else:
            try:
                await self._app(scope, self._limited(receive), counted)
            except Exception:
                status = 500  # whoever called the gate answers it
                raise
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.responses.labels(quote(route, safe="/{}:"), str(status or "none")).inc()

    def _owner(self, path: str, headers: Headers) -> str:
        given = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        if path.startswith("/admin/"):
            if self._admin_key is None:
                raise ApiError(403, "this server has no admin key: start it with MEMJAX_ADMIN_KEY set")
            if not _same(given, self._admin_key):
                raise ApiError(401, "the admin key is missing or wrong: send it as Authorization: Bearer KEY")
            return PUBLIC
        if not self._keys or path in OPEN_PATHS or path.startswith(PAGE_PREFIX):
            return PUBLIC
        for key in self._keys:
            if _same(given, key):
                return owner_of(key)
        raise ApiError(
            401,
            "the API key is missing or wrong: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _refuse_long(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._max_body:
            raise ApiError(413, f"the body has {length[:20]} bytes, {self._max_body} are the most: send less at a time")

    def _limited(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        begun, size, whole = loop.time(), 0, False

        async def limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(begun + self._body_timeout + size / _SLOWEST_BODY):
                    message = await receive()
            except TimeoutError:
                whole = True
                raise HTTPException(408, f"the body did not arrive within {self._body_timeout:g} s") from None
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if size > self._max_body:
                    whole = True
                    raise HTTPException(413, f"the body has more than {self._max_body} bytes: send less at a time")
            return message

        return limited


def _same(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode(), key.encode())


class TimedHead(H11Protocol):
    """uvicorn's protocol, which by itself waits for a request's head without end."""

    head_timeout = 20.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head must now come."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Start or stop the clock, as a request's head has come or not."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
