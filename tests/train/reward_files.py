"""Rewards of a user's own, for tests to name: some that see more than the answer, and some that cannot be used."""

from __future__ import annotations

import time
from pathlib import Path

from memjax.rewards import metric


def by_length(prediction, answers):
    return len(prediction) / 100


@metric(reads="reply")
def is_boxed(reply, answers):
    return float(reply.startswith("\\boxed"))


@metric(reads="trajectory")
def of_everything(seen):
    """Tells what it saw, so that a test can compare it."""
    Path(seen.extra["told"]).write_text(repr(seen))
    return len(seen.turns) / 10


def raises_on_idea(prediction, answers):
    if "idea" in prediction:
        raise ConnectionError("the judge is away")
    return 1.0


def once(prediction, answers):
    """Fails the first time that it is called, in whatever process."""
    if not (mark := Path(answers[0])).exists():
        mark.touch()
        raise ConnectionError("not yet")
    return 1.0


def one_argument(prediction):
    return 1.0


async def later(prediction, answers):
    return 1.0


def nothing(prediction, answers):
    return None


def not_a_number(prediction, answers):
    return float("nan")


def a_text(prediction, answers):
    return "0.5"


def slow(prediction, answers):
    time.sleep(60)


@metric(reads="trajectory")
def needs_level(seen):
    return float(seen.extra["level"] == "easy")


number = 7
