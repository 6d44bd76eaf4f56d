"""What a finished trajectory is worth: by the metric of its task, or by the rewards of the config."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from memjax.data.tasks import read_tasks
from memjax.episodes.diagnosis import Diagnosis
from memjax.episodes.episode import Turn
from memjax.episodes.run import is_own_fault
from memjax.episodes.transcript import transcript_of, transcript_turn
from memjax.rewards import METRICS
from memjax.rewards.answers import extract_answer
from memjax.rewards.pool import Item, RewardPool, ScoringPool
from memjax.rewards.transcript import TranscriptTurn
from memjax.train.config import RewardConfig, TaskConfig, TrainConfig
from memjax.train.scored import ScoredTrajectory
from memjax.trajectory import Task, Trajectory

_TRIES = 2
_LOOKED_AT = 100  # tasks of a file, for the metrics that its lines name
_THE_TASKS = (RewardConfig(outcome=True),)


@dataclass(frozen=True)
class Watched:
    """What is kept of an episode's turns until it is scored: give `add` every turn."""

    diagnosis: Diagnosis
    turns: list[TranscriptTurn] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        """Take a turn."""
        self.diagnosis.add(turn)
        self.turns.append(transcript_turn(turn))


@dataclass(frozen=True)
class Scorer:
    """Gives trajectories their rewards; without `rewards`, that of the task's metric."""

    rewards: Sequence[RewardConfig]
    pool: ScoringPool

    async def score(self, task: Task, trajectory: Trajectory, watched: Watched) -> ScoredTrajectory:
        """The trajectory with its reward: 0 where it failed, and where it could not be scored, with the reason.

        A metric that gives no number is tried twice, by another worker if there is one.
        """
        rewards = sorted(self.rewards or _THE_TASKS, key=lambda reward: not reward.outcome)
        failure, errors, values = trajectory.failure, list[str](), [0.0] * len(rewards)
        if failure is None:
            seen = transcript_of(task, trajectory, extract_answer(trajectory.answer), watched.turns)
            items = [Item.of(reward.metric or task.metric, seen) for reward in rewards]
            scores = await asyncio.gather(*(self.pool.score_async(item, _TRIES) for item in items))
            errors = [score.error for score in scores if score.error is not None]
            values = [0.0 if errors else score.value for score in scores]
        total = sum(reward.weight * value for reward, value in zip(rewards, values, strict=True))
        fates = () if failure or errors else watched.diagnosis.fates(correct=values[0] >= 1)
        by_name = dict(zip([reward.name for reward in rewards], values, strict=True)) if self.rewards else {}
        broken = breakdown_of(trajectory)
        finished = replace(trajectory, reward=total, failure=None)
        return ScoredTrajectory(finished, fates, errors[0] if errors else None, broken, by_name)


def breakdown_of(trajectory: Trajectory) -> str | None:
    """What the machinery around an episode did not do, even where its agent went on without; None if it did all."""
    if trajectory.failure is not None:
        return None if is_own_fault(trajectory.failure) else trajectory.error
    failed = trajectory.counters.get("failed_calls", 0)
    return f"{failed:g} calls of the model or an environment failed, and the agent went on without" if failed else None


def reward_means(scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """`reward/NAME/mean` of each of several rewards, over the trajectories that were scored."""
    rows = [one.rewards for one in scored if one.lost is None and one.rewards]
    return {f"reward/{name}/mean": sum(row[name] for row in rows) / len(rows) for name in (rows[0] if rows else ())}


def check_rewards(config: TrainConfig, sources: Sequence[TaskConfig | None] | None = None) -> list[str]:
    """Try each reward on a made-up answer to the first task that it would see, and return what is to be told.

    ValueError, in a sentence, for one that can score no answer.
    """
    rewards, found = config.rewards or _THE_TASKS, dict[str, Task | None]()
    for source in (config.data, config.validation.data) if sources is None else sources:
        if source and source.path:
            for task in islice(read_tasks(source.path, metric=source.metric), _LOOKED_AT):
                for reward in rewards:
                    found.setdefault(reward.metric or task.metric, task)
    for reward in config.rewards:
        found.setdefault(reward.metric or "em", None)
    if METRICS.keys() >= found.keys():
        return []
    with RewardPool(workers=1, timeout=config.reward_seconds) as pool:
        return [doubt for name, first in found.items() if (doubt := pool.check(name, first))]
