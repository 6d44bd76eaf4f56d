"""Tells where an agent blocks the event loop: while it does, no other episode goes on, and no reply arrives."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from memjax.own_code import OURS, is_library

log = logging.getLogger(__name__)

PATIENCE = 10
"""Seconds without a turn of the loop before it is said."""

_told: set[str] = set()  # files that were told
_watches: dict[asyncio.AbstractEventLoop, _Watch] = {}


@contextmanager
def watched(file: str | None) -> Iterator[None]:
    """Watch the running event loop while an agent whose code is in `file` works; nothing for an agent of ours.

    The seconds are counted by a thread that sleeps one at a time, so a process that was suspended has not blocked. Only
    a loop whose innermost code, libraries aside, is the user's counts, in whatever file: what this package does takes
    its time. All episodes of a loop share a thread.
    """
    if file is None or file.startswith(OURS):
        yield
        return
    loop = asyncio.get_running_loop()
    watch = _watches[loop] = _watches.get(loop) or _Watch(loop)
    watch.files.add(file)
    watch.episodes += 1
    try:
        yield
    finally:
        watch.episodes -= 1
        if not watch.episodes:
            del _watches[loop]
            watch.end()


class _Watch:
    """Of one loop, for the episodes that run in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.episodes, self.files = 0, set[str]()
        self._loop, self._blocking = loop, threading.get_ident()
        self._done, self._turned = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._look, daemon=True)
        with suppress(RuntimeError):  # there may be no more threads: then nobody is told
            thread.start()
        self._turn()

    def end(self) -> None:
        """End the thread."""
        self._done.set()
        self._beat.cancel()

    def _turn(self) -> None:
        self._turned.set()
        self._beat = self._loop.call_later(PATIENCE / 20, self._turn)

    def _look(self) -> None:
        blocked = 0
        while not self._done.wait(PATIENCE / 10):
            place = None if self._turned.is_set() else _place(self.files, sys._current_frames().get(self._blocking))
            self._turned.clear()
            blocked = blocked + 1 if place else 0
            if place and blocked >= 10 and place[0] not in _told:
                _told.add(place[0])
                log.warning(
                    "%s:%d has blocked for %d seconds, and every other episode with it: await an async library there, "
                    "or run it beside them with `await asyncio.to_thread(function, ...)`",
                    *place,
                    PATIENCE,
                )


def _place(files: Collection[str], frame: FrameType | None) -> tuple[str, int] | None:
    """The file and line of the user's at which a thread stands; None where it is in code of ours, or in none of those.

    What is in `files` is the user's, even where it is installed.
    """
    while frame is not None and not (name := frame.f_code.co_filename).startswith(OURS):
        if name in files or not is_library(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return None
