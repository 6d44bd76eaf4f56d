"""Uploads are looked into by threads of their own, and what parses them ends when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from fastapi import Request

from memjax.data.parsing import ended_with_block
from memjax.serve.streaming import unless_gone

Result = TypeVar("Result")

_THREADS = ThreadPoolExecutor(4, "memjax-upload")  # however long they take, other requests have theirs


async def look_into(request: Request, function: Callable[..., Result], *args: object) -> Result:
    """What `function` returns; ApiError as soon as the client of the request has left."""
    with ended_with_block():
        work = asyncio.get_running_loop().run_in_executor(_THREADS, copy_context().run, function, *args)
        return await unless_gone(request, work)
