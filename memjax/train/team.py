"""What the processes of one run tell one another. Where there is one process, every call is its own answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

Item = TypeVar("Item")

_MOST_BYTES = 1 << 26  # of each process on the devices at a time


def is_first() -> bool:
    """Whether this is the process that writes the files and talks to people."""
    return jax.process_index() == 0


def share_of(items: Sequence[Item]) -> Sequence[Item]:
    """What this process has to do of the items that every process knows."""
    return items[jax.process_index() :: jax.process_count()]


def exchange(own: bytes) -> list[bytes]:
    """What every process gave, in their order; each waits for all."""
    if jax.process_count() == 1:
        return [own]
    sizes = process_allgather(np.int32(len(own)))
    longest = int(sizes.max())
    # Powers of two: a transfer is compiled for each width.
    width = min(_MOST_BYTES, 1 << max(longest - 1, 0).bit_length())
    padded = np.zeros(-(-longest // width) * width, np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    blocks = [process_allgather(padded[start : start + width]) for start in range(0, len(padded), width)]
    joined = np.concatenate(blocks, axis=1) if blocks else np.zeros((len(sizes), 0), np.uint8)
    return [row[:size].tobytes() for row, size in zip(joined, sizes, strict=True)]


def anywhere(flag: bool) -> bool:
    """Whether the flag is up in any process."""
    return b"1" in exchange(b"1" if flag else b"0")


def by_the_first(work: Callable[[], None]) -> None:
    """Let the first process do something that the others wait for; its ValueError or OSError is raised in all."""
    failure: ValueError | OSError | None = None
    if is_first():
        try:
            work()
        except (ValueError, OSError) as error:
            failure = error
    said = exchange(str(failure).encode() if failure else b"")[0]
    if failure:
        raise failure
    if said:
        raise ValueError(said.decode())
