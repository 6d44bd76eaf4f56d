"""Whether the time may decide what is forgotten: a clock that jumped must not delete what people keep."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

DAY = 86_400.0
_JUMP = 300.0  # seconds that the wall clock may gain on the machine's own between two looks


class TrustedClock:
    """Follows the wall clock; after a jump ahead it is not trusted until it ran evenly for `patience` seconds.

    `last` is what the wall clock said when a server was last here: more than a day without one counts as a jump too,
    because nothing tells the two apart.
    """

    def __init__(self, last: float, patience: float):
        self._wall, self._patience = last, patience
        self._steady: float | None = None
        self._trusted_from = 0.0

    def is_trusted(self, wall: float, steady: float) -> bool:
        """Take a look, in seconds of the wall clock and of a clock that nobody sets."""
        ahead = wall - self._wall - (0.0 if self._steady is None else steady - self._steady)
        if ahead > (DAY if self._steady is None else _JUMP):
            self._trusted_from = steady + self._patience
            told = "the clock is %.1f h ahead of when a server was last here: nothing is forgotten for another %.1f h"
            log.warning(told, ahead / 3600, self._patience / 3600)
        self._wall, self._steady = wall, steady
        return steady >= self._trusted_from


def steady_seconds() -> float:
    """Seconds that nobody sets; on Linux with those in which the machine slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
