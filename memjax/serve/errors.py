"""What goes wrong with a request: one exception with a status and a sentence, answered in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

CLIENT_GONE = 499
"""The status under which a request is counted whose client left; nobody receives it."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""What OpenAI calls errors of a status, where that is not the one word for all of 4xx or 5xx."""


_INSTEAD = {
    "/v1/responses": ": this server speaks OpenAI's chat completions, so send messages to /v1/chat/completions",
    "/v1/embeddings": ": this server makes no embeddings; it generates, at /v1/chat/completions and /v1/completions",
}
"""What to ask where a client of OpenAI's looks for what is not there."""


class ApiError(Exception):
    """Why a request is refused or failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def install_handlers(app: FastAPI) -> None:
    """Answer every failure of a route in the same shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)


def sentence(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors: where, what, and the value."""
    place = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
    if error["type"] == "missing":
        return f"{place} is missing"
    got = repr(error.get("input"))
    return f"{place}: {error['msg']}, got {got if len(got) <= 80 else got[:77] + '...'}"


def not_json(request: Request) -> ApiError:
    """A body that does not say that it is JSON."""
    sent_as = request.headers.get("content-type", "")
    said = f"it says {sent_as[:100]}" if sent_as else "it does not say what it is"
    return ApiError(400, f"the body must be JSON and say so: {said}; send Content-Type: application/json")


def invalid(error: Mapping[str, Any]) -> ApiError:
    """One of pydantic's errors as a 400, with the name of the field."""
    fields = [str(part) for part in error["loc"] if part != "body"]
    return ApiError(400, sentence(error), param=fields[0] if fields else None)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON ({first['ctx']['error']} at character {first['loc'][-1]})"
        ).response()
    sent_as = request.headers.get("content-type", "")
    if first["loc"] == ("body",) and isinstance(first["input"], bytes) and "json" not in sent_as:
        return not_json(request).response()
    return invalid(first).response()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    said = {
        "Not Found": f"there is nothing at {request.url.path}",
        "Method Not Allowed": f"{request.method} is not for {request.url.path}",
    }
    message = said.get(error.detail, error.detail) + _INSTEAD.get(request.url.path, "")
    return ApiError(error.status_code, message, headers=error.headers).response()
