"""An environment within an episode: it acts once, and a resumed episode is told what it said before."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from memjax.environments.environment import Environment, Step
from memjax.trajectory import Task

if TYPE_CHECKING:
    from memjax.episodes.episode import Key
    from memjax.episodes.journal import EpisodeJournal

_CLOSE_SECONDS = 10.0


class EnvironmentFailure(RuntimeError):  # noqa: N818  (as in "whose fault": the machinery's, not the agent's)
    """An environment hung, died, or answered differently when its actions were repeated."""


class ActingIn:
    """One environment: its actions so far, and those of them that the journal answered and it has not done itself.

    Before the first action that the journal does not know, these are repeated, and what comes back is compared.
    """

    def __init__(self, environment: Environment, task: Task, seed: int, recorder: EpisodeJournal | None):
        self._environment, self._task, self._seed, self._recorder = environment, task, seed, recorder
        self.name = getattr(environment, "name", type(environment).__name__)
        self._can_repeat = bool(getattr(environment, "repeatable", True))
        self._history = ""
        self._answered: list[tuple[str | None, Step]] = []  # by the journal
        self._acted = False
        self.turn = asyncio.Lock()  # held by whoever acts: it has one place at a time

    def digest(self, key: Key, action: str | None) -> str:
        """Of an action, or None for the reset, with all before it."""
        beside = json.dumps([self._history, self.name, self._task.question, self._seed, action])
        self._history = hashlib.sha256(beside.encode()).hexdigest()
        return self._recorder.value_digest(key, self.name, [self._history]) if self._recorder else ""

    def known(self, digest: str, action: str | None) -> Step | None:
        """What the journal says came back, as long as this drive has not acted."""
        if self._recorder is None or self._acted or not self._can_repeat:
            return None
        if (step := self._recorder.find_observation(digest)) is not None:
            self._answered.append((action, step))
        return step

    def starts_over(self, digest: str) -> bool:
        """Whether it must act although the journal knows what came back."""
        return (
            not self._can_repeat and self._recorder is not None and self._recorder.find_observation(digest) is not None
        )

    async def act(self, action: str | None, timeout: float) -> Step:
        """Act, in the place where the actions so far lead. Raises EnvironmentFailure."""
        answered, self._answered, self._acted = self._answered, [], True
        for before, expected in answered:
            found = await self._told(before, timeout)
            if differing := _difference(expected, found):
                raise EnvironmentFailure(
                    f"the environment {self.name} cannot be resumed: repeated, {_shown(before)} gave {differing}; "
                    "start over (--fresh), and give the environment `repeatable = False` if this is its nature"
                )
        return await self._told(action, timeout)

    async def close(self) -> None:
        """Close it, whatever that gives."""
        try:
            await asyncio.wait_for(self._environment.close(), _CLOSE_SECONDS)
        except Exception:  # the boundary to other people's code: the episode has its result already
            return

    async def _told(self, action: str | None, timeout: float) -> Step:
        async def answer() -> Step:
            if action is None:
                return await self._environment.reset(self._task, seed=self._seed)
            return await self._environment.step(action)

        what = _shown(action)
        try:
            async with asyncio.timeout(timeout):  # not wait_for: in a task of its own a SystemExit ends the loop
                step = await answer()
        except TimeoutError:
            raise EnvironmentFailure(f"the environment {self.name} gave nothing for {what} in {timeout:g} s") from None
        except (Exception, SystemExit) as error:  # the boundary to other people's code
            told = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(f"the environment {self.name} failed at {what}: {told}") from error
        if fault := _fault_of(step):
            raise EnvironmentFailure(f"the environment {self.name} gave {step!r:.120} for {what}, {fault}")
        return step


def _fault_of(step: Any) -> str | None:
    """What keeps something from being a Step."""
    if not isinstance(step, Step):
        return "which is not a Step"
    if not isinstance(step.text, str):
        return "whose text is not a str"
    if isinstance(step.reward, bool) or not isinstance(step.reward, Real) or not math.isfinite(step.reward):
        return "whose reward is not a finite number"
    if not isinstance(step.actions, tuple | list) or not all(isinstance(action, str) for action in step.actions):
        return "whose actions are not a tuple of str"
    return None


def _difference(expected: Step, found: Step) -> str:
    for name in ("text", "reward", "terminated", "truncated", "actions"):
        was, is_ = getattr(expected, name), getattr(found, name)
        if was != is_:
            return f"the {name} {str(is_)[:60]!r} instead of {str(was)[:60]!r}"
    return ""


def _shown(action: str | None) -> str:
    return "its reset" if action is None else f"the action {action[:80]!r}"
