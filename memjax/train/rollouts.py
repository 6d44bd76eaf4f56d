"""Tasks to scored trajectories: groups of samples for learning, answers for validation, and files of both to read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memjax.agents.memagent import MemAgent
from memjax.data.seeds import derive_seed, stream
from memjax.data.tasks import read_tasks
from memjax.rewards.answers import extract_answer
from memjax.rewards.pool import Item, RewardPool, Score
from memjax.rollout.client import Client, ClientError
from memjax.train.advantages import informative
from memjax.train.config import RolloutConfig, TaskConfig, TrainConfig, ValidationConfig
from memjax.trajectory import SamplingParams, Task, Trajectory


class TaskSource:
    """Tasks by number, without end: a file's come in another order in every epoch."""

    def __init__(self, config: TaskConfig, seed: int):
        self._tiny, self._seed = config.tiny, seed
        self._epoch, self._order = -1, list[int]()
        self._tasks = list(read_tasks(config.path, metric=config.metric)) if config.path else []
        if config.path and not self._tasks:
            raise ValueError(f"{config.path} holds no task")

    @property
    def size(self) -> int | None:
        """How many different tasks there are; None for a generator."""
        return None if self._tiny else len(self._tasks)

    def training(self, number: int) -> Task:
        """Task `number` of the training order."""
        if self._tiny:
            return self._tiny.task(number)
        epoch, place = divmod(number, len(self._tasks))
        if epoch != self._epoch:
            order = stream(self._seed, "order", epoch).sample(range(len(self._tasks)), len(self._tasks))
            self._epoch, self._order = epoch, order
        return self._tasks[self._order[place]]

    def first(self, count: int) -> list[Task]:
        """The first `count` tasks in their own order, or all if there are fewer."""
        return [self._tiny.task(i) for i in range(count)] if self._tiny else self._tasks[:count]


def validation_tasks(config: TrainConfig) -> list[Task]:
    """The tasks that a run is judged by; none without a source."""
    validation = config.validation
    return TaskSource(validation.data, config.seed).first(validation.tasks) if validation.data else []


@dataclass(frozen=True)
class Attempt:
    """A scored trajectory, and the task that it worked."""

    task: Task
    trajectory: Trajectory
    reward_error: str | None = None

    @property
    def reward(self) -> float:
        """What it is worth."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward


@dataclass(frozen=True)
class Collected:
    """A rollout batch: whole groups in the order of their tasks."""

    sampled: list[Attempt]
    kept: list[Attempt]  # to learn from; the others are of groups whose rewards were all equal
    tasks_drawn: int  # from the training order

    @property
    def trajectories(self) -> list[Trajectory]:
        """What the learner reads."""
        return [attempt.trajectory for attempt in self.kept]


@dataclass(frozen=True)
class Sampler:
    """Whom trajectories are sampled with. Nothing but the weights changes between two steps."""

    agent: MemAgent
    client: Client
    pool: RewardPool
    source: TaskSource
    config: RolloutConfig
    seed: int

    def check(self) -> None:
        """ValueError, before anything is sampled, where the tasks or the window cannot serve a batch."""
        size = self.source.size
        if size is not None and size < self.config.groups:
            raise ValueError(
                f"a step learns from rollout.groups = {self.config.groups} tasks, but there are only {size}: lower it"
            )
        self.agent.check_window(self.source.training(0).question, self.client.window, "rollout.max_length")

    async def collect(self, first: int, *, dynamic: bool) -> Collected:
        """A rollout batch from task number `first` of the training order on.

        With `dynamic` sampling, groups without variance give way to those of the next tasks, `refills` times at most:
        near the ceiling of a task most groups have none, and a batch may stay short.
        """
        sampled: list[Attempt] = []
        kept: list[Attempt] = []
        drawn = 0
        missing = self.config.groups
        for _ in range(1 + (self.config.refills if dynamic else 0)):
            numbers = range(first + drawn, first + drawn + missing)
            attempts = [a for group in await asyncio.gather(*map(self._group, numbers)) for a in group]
            if all(attempt.trajectory.error for attempt in attempts):
                raise ClientError(
                    f"none of {len(attempts)} trajectories came to its end: {attempts[0].trajectory.error}"
                )
            drawn += missing
            keep_N = _informative(attempts) if dynamic else [True] * len(attempts)
            sampled += attempts
            kept += [attempt for attempt, keep in zip(attempts, keep_N, strict=True) if keep]
            missing = self.config.groups - len(kept) // self.config.samples
            if not missing:
                break
        return Collected(sampled, kept, drawn)

    async def _group(self, number: int) -> Sequence[Attempt]:
        task = replace(self.source.training(number), group=str(number))
        sampling = SamplingParams(temperature=self.config.temperature)
        return await answer_task(self.agent, task, self.client, self.pool, sampling, self.config.samples, self.seed)


@dataclass(frozen=True)
class Validator:
    """Answers the tasks that a run is judged by, always with the same seeds."""

    agent: MemAgent
    client: Client
    pool: RewardPool
    tasks: Sequence[Task]
    config: ValidationConfig
    seed: int

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to validate after this step: every so often, and after the last one."""
        return step % self.config.every == 0 or step == steps

    async def run(self) -> dict[str, float]:
        """Mean reward, and mean over tasks of the best of the samples; nothing without tasks."""
        if not self.tasks:
            return {}
        started = time.perf_counter()
        samples = self.config.samples
        sampling = SamplingParams(temperature=self.config.temperature, top_p=self.config.top_p)
        seed = derive_seed(self.seed, "validation")
        attempts = await asyncio.gather(
            *(answer_task(self.agent, task, self.client, self.pool, sampling, samples, seed) for task in self.tasks)
        )
        rewards = np.array([[attempt.reward for attempt in group] for group in attempts])
        return {
            f"val/reward/mean@{samples}": float(rewards.mean()),
            f"val/reward/best@{samples}": float(rewards.max(axis=1).mean()),
            "val/failed": sum(attempt.trajectory.error is not None for group in attempts for attempt in group),
            "timing_s/testing": time.perf_counter() - started,
        }


async def answer_task(
    agent: MemAgent,
    task: Task,
    client: Client,
    pool: RewardPool,
    sampling: SamplingParams,
    samples: int,
    seed: int,
) -> Sequence[Attempt]:
    """Work a task `samples` times, each with a seed of its own that the task's group or id names."""

    async def attempt(sample: int) -> Attempt:
        drawn = replace(sampling, seed=derive_seed(seed, "sample", task.group or task.id, sample))
        trajectory = await replace(agent, sampling=drawn).run(task, client)
        score = await _score(trajectory, task, pool)
        return Attempt(task, replace(trajectory, reward=score.value), score.error)

    return await asyncio.gather(*map(attempt, range(samples)))


def rollout_metrics(attempts: Sequence[Attempt]) -> dict[str, float]:
    """What a batch of attempts says of rewards, lengths and faults, under the names it is logged with."""
    if not attempts:
        return {}
    rewards = np.array([attempt.reward for attempt in attempts])
    trajectories = [attempt.trajectory for attempt in attempts]
    conversations = [c for trajectory in trajectories for c in trajectory.conversations]
    replies = np.array([c.loss_mask.sum() for c in conversations] or [0])
    lengths = np.array([len(c.token_ids) for c in conversations] or [0])

    def total(counter: str) -> float:
        return float(sum(trajectory.counters.get(counter, 0) for trajectory in trajectories))

    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "response_length/mean": float(replies.mean()),
        "response_length/max": float(replies.max()),
        "prompt_length/mean": float((lengths - replies).mean()),
        "rollout/conversations": len(conversations),
        "rollout/failed": sum(trajectory.error is not None for trajectory in trajectories),
        "rollout/reward_errors": sum(attempt.reward_error is not None for attempt in attempts),
        "rollout/document_tokens": total("document_tokens"),
        "rollout/truncated_document_tokens": total("truncated_tokens"),
        "memory/truncated": total("truncated_memories"),
        "memory/empty": total("empty_updates"),
    }


def step_metrics(batch: Collected, sampling: float, learning: float) -> dict[str, float]:
    """What a step drew and how fast, given the seconds of its two halves."""
    sampled = [attempt.trajectory for attempt in batch.sampled]
    tokens = sum(len(c.token_ids) for t in sampled for c in t.conversations)
    document_tokens = sum(t.counters.get("document_tokens", 0) for t in sampled)
    dropped = {t.group_id for t in sampled} - {t.group_id for t in batch.trajectories}
    return {
        "rollout/tasks_drawn": batch.tasks_drawn,
        "rollout/groups_dropped": len(dropped),
        "rollout/doc_tokens_per_s": document_tokens / sampling,
        "timing_s/gen": sampling,
        "timing_s/update_actor": learning,
        "timing_s/step": sampling + learning,
        "perf/throughput": tokens / (sampling + learning),
    }


def write_rollouts(path: Path, attempts: Iterable[Attempt], decode: Callable[[Sequence[int]], str]) -> None:
    """Write attempts as people read them, one JSON object a line: question, every memory, answer, reward."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for attempt in attempts:
            trajectory = attempt.trajectory
            row = {
                "task": attempt.task.id,
                "question": attempt.task.question,
                "answers": list(attempt.task.answers),
                "reward": trajectory.reward,
                "answer": trajectory.answer,
                "memories": [
                    decode([int(i) for i in c.token_ids[c.loss_mask]])
                    for c in trajectory.conversations
                    if c.kind == "memory"
                ],
                "error": trajectory.error or attempt.reward_error,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


async def _score(trajectory: Trajectory, task: Task, pool: RewardPool) -> Score:
    """The reward is the metric of the evaluation, on the answer that it would extract; a failed attempt gets 0."""
    if trajectory.error is not None:
        return Score(0.0)
    reads_reply = task.metric == "memagent_reward"
    prediction = trajectory.answer if reads_reply else extract_answer(trajectory.answer)
    return await pool.score_async(Item(task.metric, prediction, task.answers))


def _informative(attempts: Sequence[Attempt]) -> np.ndarray:
    rewards_N = np.array([attempt.reward for attempt in attempts])
    return informative(rewards_N, [attempt.trajectory.group_id for attempt in attempts])
