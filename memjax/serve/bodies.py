"""JSON bodies: their shape bounded while they arrive, parsed off the event loop, and only whole characters in them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from memjax.serve.errors import ApiError, not_json
from memjax.text import whole_strings

_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+("|\\?\Z)', re.DOTALL)
_STRUCTURE = b",:[{"
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_IN_A_THREAD = 1 << 16  # bytes from which parsing would be felt by other clients


class JsonShape:
    """Counts the values of a JSON text that comes in pieces: each comma, colon and opening bracket outside strings.

    A million empty objects take a second and a gigabyte to parse and to check, a string of the same size neither.
    """

    def __init__(self) -> None:
        self.values = 0
        self._open = b""  # what a piece begins with: the string that the piece before left open

    def add(self, piece: bytes) -> int:
        """Take the next piece; return the count so far."""
        parts = _STRING.split(self._open + piece)
        outside, ends = b"".join(parts[::2]), parts[1::2]
        self.values += sum(map(outside.count, map(bytes, zip(_STRUCTURE, strict=True))))
        self._open = b"" if not ends or ends[-1] == b'"' or parts[-1] else b'"' + ends[-1]
        return self.values


class JsonRoute(APIRoute):
    """A route whose JSON body is parsed in a thread where it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that parses so."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


class JsonRequest(Request):
    """A request whose `json` leaves the event loop to others, and has U+FFFD for half of a surrogate pair.

    Clients that cut text in UTF-16 halves send such; it is no text that could be tokenised or stored.
    """

    async def json(self) -> Any:
        """The body's value; ValueError where it is no JSON."""
        body = await self.body()
        return await asyncio.to_thread(parse_json, body) if len(body) > _IN_A_THREAD else parse_json(body)


async def json_body(request: Request) -> Any:
    """The JSON body of a route that takes forms as well; ApiError for what is neither."""
    try:
        if "json" not in request.headers.get("content-type", ""):
            raise not_json(request)
        return await request.json()
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON ({error.msg} at character {error.pos})") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read as JSON ({error})") from None


def parse_json(body: bytes) -> Any:
    """The value of a JSON text, its strings whole characters."""
    value = json.loads(body)
    return whole_strings(value) if _HALF_PAIR.search(body) else value
