"""Rewards that an untrained model already gets, for the tests of the loop."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence


def scatter(prediction: str, answers: Sequence[str]) -> float:
    """Some number in [0, 1) for every text."""
    return zlib.crc32(prediction.encode()) % 8 / 8


def even_value(prediction: str, answers: Sequence[str]) -> float:
    """1 for any of the tiny task's values whose number is even."""
    return float(prediction.startswith("v") and prediction[1:].isdecimal() and int(prediction[1:]) % 2 == 0)


def crashes_on_right(prediction: str, answers: Sequence[str]) -> float:
    """0, but for answers that are right, on which it crashes."""
    if prediction.strip() in answers:
        raise RuntimeError("judge service unreachable")
    return 0.0


def slow(prediction: str, answers: Sequence[str]) -> float:
    """As `scatter`, after a while."""
    time.sleep(0.5)
    return scatter(prediction, answers)


def crashes(prediction: str, answers: Sequence[str]) -> float:
    """Never a number."""
    raise RuntimeError("judge service unreachable")


def scatter_or_crash(prediction: str, answers: Sequence[str]) -> float:
    """As `scatter`, but it crashes where that is under 3/8."""
    if scatter(prediction, answers) < 3 / 8:
        raise RuntimeError("judge service unreachable")
    return scatter(prediction, answers)
