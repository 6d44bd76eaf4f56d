"""Tasks to scored trajectories: groups of samples for learning, answers for validation, and files of both to read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from memjax.agents.memagent import MemAgent
from memjax.data.seeds import derive_seed, stream
from memjax.data.tasks import read_tasks
from memjax.rewards.answers import extract_answer
from memjax.rewards.pool import Item, RewardPool, Score
from memjax.rollout.client import Client, ClientError
from memjax.train.advantages import informative
from memjax.train.attempts import Attempt, from_bytes, to_bytes
from memjax.train.config import RolloutConfig, TaskConfig, TrainConfig, ValidationConfig
from memjax.train.team import exchange, share_of
from memjax.trajectory import SamplingParams, Task, Trajectory


class TaskSource:
    """Tasks by number, without end: those of a file or data set come in another order in every epoch."""

    def __init__(self, config: TaskConfig, seed: int):
        self._tiny, self._seed = config.tiny, seed
        self._epoch, self._order = -1, list[int]()
        self._tasks = _stored_tasks(config)
        if not self._tiny and not self._tasks:
            raise ValueError(f"{config.path or config.tfds} holds no task")

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
        if self._tiny:
            return [self._tiny.task(i) for i in range(count)]
        return [self._tasks[i] for i in range(min(count, len(self._tasks)))]


class _Tasks(Protocol):
    """Tasks by position; a prepared data set reads each when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Task: ...


def _stored_tasks(config: TaskConfig) -> _Tasks:
    """The tasks of a file or of a prepared data set; none where they are made."""
    if config.path:
        return list(read_tasks(config.path, metric=config.metric))
    if config.tfds is None:
        return ()
    try:
        from memjax.data.tfds.records import TaskSource as PreparedTasks
    except ImportError:
        raise ValueError("data.tfds needs tensorflow-datasets: uv sync --extra tfds") from None
    return PreparedTasks(config.tfds, config.split)


def validation_tasks(config: TrainConfig) -> list[Task]:
    """The tasks that a run is judged by; none without a source."""
    validation = config.validation
    return TaskSource(validation.data, config.seed).first(validation.tasks) if validation.data else []


@dataclass(frozen=True)
class Collected:
    """A rollout batch: whole groups in the order of their tasks. `metrics` say how it was sampled."""

    sampled: Sequence[Attempt]
    kept: Sequence[Attempt]  # to learn from; the others are of groups whose rewards were all equal
    tasks_drawn: int  # from the training order
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """What the learner reads."""
        return [attempt.trajectory for attempt in self.kept]


@dataclass(frozen=True)
class Sampler:
    """Whom trajectories are sampled with. Nothing but the weights changes between two steps.

    Every process samples its share of the groups with an engine of its own, then each has all of them. With `dynamic`
    sampling, groups without variance are left out.
    """

    agent: MemAgent
    client: Client
    pool: RewardPool
    source: TaskSource
    config: RolloutConfig
    seed: int
    dynamic: bool

    def check(self) -> None:
        """ValueError, before anything is sampled, where the tasks or the window cannot serve a batch."""
        size = self.source.size
        if size is not None and size < self.config.groups:
            raise ValueError(
                f"a step learns from rollout.groups = {self.config.groups} tasks, but there are only {size}: lower it"
            )
        self.agent.check_window(self.source.training(0).question, self.client.window, "rollout.max_length")

    def own_share(self, first: int, groups: int | None = None) -> list[Attempt]:
        """The groups that fall to this process, of `groups` tasks (by default a batch) from number `first` on."""
        numbers = range(first, first + (self.config.groups if groups is None else groups))

        async def all_groups() -> list[Attempt]:
            return [a for group in await asyncio.gather(*map(self._group, share_of(numbers))) for a in group]

        return asyncio.run(all_groups())

    def collect(self, first: int, share: Sequence[Attempt] | None = None) -> Collected:
        """A rollout batch from task number `first` of the training order on; `share` is what this process has of it.

        With dynamic sampling, groups without variance give way to those of the next tasks, `refills` times at most:
        near the ceiling of a task most groups have none, and a batch may stay short.
        """
        batch = self._batch([])
        for _ in range(1 + (self.config.refills if self.dynamic else 0)):
            missing = self.config.groups - len(batch.kept) // self.config.samples
            if not missing:
                break
            share = self.own_share(first + batch.tasks_drawn, missing) if share is None else share
            sampled = [*batch.sampled, *self._of_all(share)]
            share = None
            if all(attempt.trajectory.error for attempt in sampled):
                raise ClientError(f"none of {len(sampled)} trajectories came to its end: {sampled[0].trajectory.error}")
            batch = self._batch(sampled)
        return batch

    def to_bytes(self, batch: Collected) -> bytes:
        """A batch that is still to be learned from, for a run that goes on elsewhere."""
        return to_bytes(batch.sampled, batch.metrics)

    def from_bytes(self, data: bytes) -> Collected:
        """The batch that `to_bytes` kept."""
        attempts, metrics = from_bytes(data, self._task)
        return replace(self._batch(attempts), metrics=metrics)

    def _batch(self, sampled: Sequence[Attempt]) -> Collected:
        keep_N = _informative(sampled) if self.dynamic else [True] * len(sampled)
        kept = [attempt for attempt, keep in zip(sampled, keep_N, strict=True) if keep]
        return Collected(sampled, kept, len(sampled) // self.config.samples)

    def _of_all(self, share: Sequence[Attempt]) -> Sequence[Attempt]:
        parts = exchange(to_bytes(share))
        if len(parts) == 1:
            return share
        attempts = [attempt for part in parts for attempt in from_bytes(part, self._task)[0]]
        return sorted(attempts, key=lambda attempt: int(attempt.trajectory.group_id))

    async def _group(self, number: int) -> Sequence[Attempt]:
        task = self._task(str(number))
        sampling = SamplingParams(temperature=self.config.temperature)
        return await answer_task(self.agent, task, self.client, self.pool, sampling, self.config.samples, self.seed)

    def _task(self, group: str) -> Task:
        """The task whose number in the training order names the group."""
        return replace(self.source.training(int(group)), group=group)


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

    def run(self) -> dict[str, float]:
        """Mean reward, and mean over tasks of the best of the samples; nothing without tasks."""
        if not self.tasks:
            return {}
        started = time.perf_counter()
        samples = self.config.samples
        own = [[attempt.reward, attempt.trajectory.error is not None] for attempt in asyncio.run(self._own_share())]
        found = b"".join(exchange(np.array(own, np.float64).tobytes()))
        # Tasks stand in the order of the processes that answered them, which no mean looks at.
        rewards, failed = np.frombuffer(found, np.float64).reshape(-1, samples, 2).transpose(2, 0, 1)
        return {
            f"val/reward/mean@{samples}": float(rewards.mean()),
            f"val/reward/best@{samples}": float(rewards.max(axis=1).mean()),
            "val/failed": float(failed.sum()),
            "timing_s/testing": time.perf_counter() - started,
        }

    async def _own_share(self) -> list[Attempt]:
        sampling = SamplingParams(temperature=self.config.temperature, top_p=self.config.top_p)
        seed = derive_seed(self.seed, "validation")
        groups = await asyncio.gather(
            *(
                answer_task(self.agent, task, self.client, self.pool, sampling, self.config.samples, seed)
                for task in share_of(self.tasks)
            )
        )
        return [attempt for group in groups for attempt in group]


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

    agent = replace(agent, sampling=sampling)
    return await asyncio.gather(*(attempt_task(agent, task, client, pool, i, seed) for i in range(samples)))


async def attempt_task(
    agent: MemAgent, task: Task, client: Client, pool: RewardPool, sample: int, seed: int
) -> Attempt:
    """Work a task once, as the sample of that number: the same one whenever it is asked for."""
    drawn = replace(agent.sampling, seed=derive_seed(seed, "sample", task.group or task.id, sample))
    trajectory = await replace(agent, sampling=drawn).run(task, client)
    score = await _score(trajectory, task, pool)
    return Attempt(task, replace(trajectory, reward=score.value), score.error)


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


def batch_metrics(batch: Collected, seconds: float) -> dict[str, float]:
    """What sampling a batch took and gave."""
    sampled = [attempt.trajectory for attempt in batch.sampled]
    dropped = {t.group_id for t in sampled} - {t.group_id for t in batch.trajectories}
    return rollout_metrics(batch.sampled) | {
        "rollout/tasks_drawn": batch.tasks_drawn,
        "rollout/groups_dropped": len(dropped),
        "rollout/tokens": sum(len(c.token_ids) for t in sampled for c in t.conversations),
        "rollout/doc_tokens_per_s": sum(t.counters.get("document_tokens", 0) for t in sampled) / seconds,
        "timing_s/gen": seconds,
    }


def step_metrics(batch: Collected, seconds: float) -> dict[str, float]:
    """How fast a step was from end to end."""
    return {"timing_s/step": seconds, "perf/throughput": batch.metrics["rollout/tokens"] / seconds}


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
