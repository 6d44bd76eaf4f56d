"""Work on many things, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


async def side_by_side(items: Iterator[Item], work: Callable[[Item], Awaitable[None]], concurrency: int) -> None:
    """Await `work` on every item, `concurrency` at a time; an item is made, on a thread, when there is a place for it.

    The first error ends all of it and is raised as it is.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    making = asyncio.Lock()
    end = object()

    async def one_place() -> None:
        while True:
            async with making:
                item = await asyncio.to_thread(next, items, end)
            if item is end:
                return
            await work(item)  # type: ignore[arg-type]  # (the end is none of the items)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_place())
    except ExceptionGroup as errors:
        # One sentence for the person, instead of a group of equal ones.
        raise _first(errors) from None


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
