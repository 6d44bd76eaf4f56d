"""Tells where an agent blocks the event loop: while it does, no other episode goes on, and no reply arrives."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

PATIENCE = 10
"""Seconds without a turn of the loop before it is said."""

_OURS = f"{Path(__file__).parents[1]}/"
_told: set[str] = set()  # files of agents that were told


@contextmanager
def watched(file: str | None) -> Iterator[None]:
    """Watch the running event loop while an agent whose code is in `file` works; nothing for an agent of ours.

    The seconds are counted by a thread that sleeps one at a time, so a process that was suspended has not blocked. Only
    a loop whose innermost code, libraries aside, is the agent's own counts: what this package does takes its time.
    """
    if file is None or file.startswith(_OURS) or file in _told:
        yield
        return
    done, turned = threading.Event(), threading.Event()
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def turn() -> None:
        turned.set()
        beats[0] = loop.call_later(PATIENCE / 20, turn)

    beats: list[asyncio.Handle] = [loop.call_soon(turn)]
    threading.Thread(target=_watch, args=(file, thread, turned, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        beats[0].cancel()


def _watch(file: str, thread: int, turned: threading.Event, done: threading.Event) -> None:
    blocked = 0
    while not done.wait(PATIENCE / 10) and file not in _told:
        line = None if turned.is_set() else _line_of(file, sys._current_frames().get(thread))
        turned.clear()
        blocked = blocked + 1 if line else 0
        if line and blocked >= 10 and file not in _told:
            _told.add(file)
            log.warning(
                "%s:%d has blocked for %d seconds, and every other episode with it: await an async library there, or "
                "run it beside them with `await asyncio.to_thread(function, ...)`",
                file,
                line,
                PATIENCE,
            )


def _line_of(file: str, frame: FrameType | None) -> int | None:
    """The line of the agent at which a thread stands; None where it is in code of ours, or not in the agent."""
    while frame is not None and not (name := frame.f_code.co_filename).startswith(_OURS):
        if name == file:
            return frame.f_lineno
        frame = frame.f_back
    return None
