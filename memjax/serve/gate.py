"""What every HTTP request passes: its key, the page it comes from, its body's size, shape and time, and the log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from urllib.parse import quote, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from memjax.serve.bodies import JsonShape
from memjax.serve.errors import ApiError
from memjax.serve.metrics import Metrics

log = logging.getLogger(__name__)
access = logging.getLogger("memjax.serve.access")

_TICK = 0.1  # seconds between two looks at how late the event loop is
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
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
    """Lets through, to `app`, what has a key, comes from no foreign page, and arrives whole, in time and in bounds.

    In `request.state` it leaves the `owner`, the `request_id` and, for fair turns, the `client`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        admin_key: str | None,
        pages: Pages,
        max_body: int,
        max_values: int,
        body_timeout: float,
        metrics: Metrics,
        lag: Callable[[], float],
    ):
        self._app, self._keys, self._admin_key, self._pages = app, tuple(keys), admin_key, pages
        self._max_body, self._max_values, self._body_timeout = max_body, max_values, body_timeout
        self._metrics, self._lag = metrics, lag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, headers = time.monotonic(), 0, Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(headers)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            owner = state["owner"] = self._owner(scope["path"], headers)
            # Without keys nothing tells clients apart but their connections.
            state["client"] = owner if owner != PUBLIC else "{}:{}".format(*(scope.get("client") or ("", 0)))
            self._pages.refuse_foreign(scope["method"], scope["path"], headers)
            self._refuse_long(headers)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        else:
            try:
                await self._app(scope, self._limited(receive, headers), counted)
            except Exception:
                if status:  # what was begun cannot be answered otherwise: uvicorn logs it and closes the connection
                    raise
                log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
                message = f"an error of the server, which it has logged as request {request_id}"
                await ApiError(500, message).response()(scope, receive, counted)
        finally:
            route, key = getattr(scope.get("route"), "path", "none"), key_name(state.get("owner", PUBLIC))
            self._metrics.responses.labels(quote(route, safe="/{}:"), str(status or "none")).inc()
            self._metrics.keys.labels(key).inc()
            access.log(
                logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO,
                "%s %s %s %.3fs key=%s request=%s",
                scope["method"],
                quote(scope["path"], safe="/:"),
                status or "none",
                time.monotonic() - begun,
                key,
                request_id,
            )

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

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        loop = asyncio.get_running_loop()
        begun, lag, size, whole = loop.time(), self._lag(), 0, False
        shape = None if headers.get("content-type", "").startswith("multipart/") else JsonShape()

        async def in_time() -> Message:
            """The next message; time in which the loop was busy with others does not count."""
            while True:
                allowed = self._body_timeout + size / _SLOWEST_BODY + self._lag() - lag
                try:
                    async with asyncio.timeout_at(begun + allowed):
                        return await receive()
                except TimeoutError:
                    if self._lag() - lag + self._body_timeout + size / _SLOWEST_BODY > allowed:
                        continue
                    raise HTTPException(408, f"the body did not arrive within {self._body_timeout:g} s") from None

        async def limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                message = await in_time()
            except HTTPException:
                whole = True
                raise
            if message["type"] == "http.request":
                body = message.get("body", b"")
                size += len(body)
                whole = not message.get("more_body", False)
                if size > self._max_body:
                    whole = True
                    raise HTTPException(413, f"the body has more than {self._max_body} bytes: send less at a time")
                if shape and shape.add(body) > self._max_values:
                    whole = True
                    raise HTTPException(400, f"the body has more than {self._max_values} values: send less at a time")
            return message

        return limited


class Pages:
    """Keeps the pages of other sites, which a browser lets send requests to this machine, out of a server without keys.

    A page whose name is pointed at this address (DNS rebinding) sends its own name as Host, which is refused; addresses
    are not, for they cannot be pointed elsewhere. One that posts across origins (CSRF), from another port of this
    machine too, says so in Origin or Sec-Fetch-Site. `allowed` are further names under which the server of the address
    `host` is reached, and whose pages may use it.
    """

    def __init__(self, *, open_to_all: bool, host: str, allowed: Sequence[str]):
        self._guarded = open_to_all
        self._allowed = frozenset(name.lower().strip("[]") for name in allowed)
        self._hosts = self._allowed | {"localhost", host.lower().strip("[]")}

    def refuse_foreign(self, method: str, path: str, headers: Headers) -> None:
        """ApiError 403 for a request that another site's page may have sent."""
        if not self._guarded or path in {"/health", "/ready", "/metrics"}:
            return
        host = headers.get("host", "")
        if not self._is_ours(host):
            raise ApiError(
                403,
                f"this server is not known as {host[:100]!r}: start it with --allowed-host {_name_of(host)[:100]!r}, "
                "or with keys",
            )
        if method in ("GET", "HEAD", "OPTIONS"):
            return
        origin = headers.get("origin")
        if origin is not None:
            netloc = urlsplit(origin).netloc.lower()
            if netloc != host.lower() and _name_of(netloc) not in self._allowed:
                raise ApiError(
                    403,
                    f"a page of {origin[:100]!r} may not use this server: start it with --allowed-host, or with keys",
                )
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "a page of another site may not use this server: start it with keys")

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        try:
            ip_address(name)
        except ValueError:
            return name in self._hosts or name.endswith(".localhost")
        return True


def _name_of(host: str) -> str:
    """The name or address in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class LoopLag:
    """How long the event loop has been late in all, in seconds: the time in which it was busy with something else."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Measure, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asleep = loop.time()
            await asyncio.sleep(_TICK)
            self.seconds += max(0.0, loop.time() - asleep - _TICK)


def key_name(owner: str) -> str:
    """What logs and metrics call a key: the beginning of its hash."""
    return owner[:8]


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex


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
