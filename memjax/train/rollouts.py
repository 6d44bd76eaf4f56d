"""Tasks to scored trajectories: groups of samples to learn from, and answers for validation."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from memjax.data.seeds import derive_seed, stream
from memjax.data.tasks import read_tasks
from memjax.episodes.diagnosis import Diagnosis, counters, evidence_of
from memjax.episodes.episode import EpisodeTokenizer, JournalMismatch
from memjax.episodes.feed import Feed
from memjax.episodes.journal import EpisodeJournal, Journal, JournalError
from memjax.episodes.run import check_window, run_episode
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import Client
from memjax.rollout.identity import ModelIdentity
from memjax.train.advantages import informative
from memjax.train.config import TaskConfig, TrainConfig
from memjax.train.logs import Unwritten
from memjax.train.scored import ScoredTrajectory, of_all_processes
from memjax.train.scoring import Scorer, Watched, breakdown_of, reward_means
from memjax.train.team import share_of
from memjax.trajectory import SamplingParams, Task, Trajectory

_TRIES = 2  # of an episode that the machinery around it ended


class StepError(RuntimeError):
    """A step from whose trajectories nothing should be learned. The message has the first reason."""


class TaskSource:
    """Tasks by number, without end: those of a file or data set come in another order in every epoch.

    `size` is how many different tasks there are; None for a generator.
    """

    def __init__(self, config: TaskConfig, seed: int):
        tasks = _stored_tasks(config)
        generator = config.tiny or config.arithmetic
        self.size: int | None = None if generator else len(tasks)
        if self.size == 0:
            raise ValueError(f"{config.path or config.tfds} holds no task")
        self._task: Callable[[int], Task] = generator.task if generator else tasks.__getitem__
        self._seed, self._epoch, self._order = seed, -1, list[int]()

    def training(self, number: int) -> Task:
        """Task `number` of the training order."""
        if self.size is None:
            return self._task(number)
        epoch, place = divmod(number, self.size)
        if epoch != self._epoch:
            order = stream(self._seed, "order", epoch).sample(range(self.size), self.size)
            self._epoch, self._order = epoch, order
        return self._task(self._order[place])

    def first(self, count: int) -> list[Task]:
        """The first `count` tasks in their own order, or all if there are fewer."""
        return [self._task(i) for i in range(count if self.size is None else min(count, self.size))]


def _stored_tasks(config: TaskConfig) -> Any:
    """The tasks of a file or of a prepared data set, by position; the latter reads each when it is asked for."""
    if config.path:
        return list(read_tasks(config.path, metric=config.metric))
    if config.tfds is None:
        return ()
    try:
        from memjax.data.tfds.records import TaskSource as PreparedTasks
    except ImportError:
        raise ValueError("data.tfds needs tensorflow-datasets: uv sync --extra tfds") from None
    return PreparedTasks(config.tfds, config.split)


@dataclass(frozen=True)
class RolloutBatch:
    """Whole groups in the order of their tasks. `metrics` say how they were sampled."""

    sampled: Sequence[ScoredTrajectory]
    kept: Sequence[ScoredTrajectory]  # to learn from; the others are of groups whose rewards were all equal
    tasks_drawn: int  # from the training order
    metrics: Mapping[str, float]

    @property
    def trajectories(self) -> list[Trajectory]:
        """What the learner reads."""
        return [one.trajectory for one in self.kept]


@dataclass(frozen=True)
class Sampler:
    """Works tasks with the config's agent. Nothing but the client's weights changes between two steps.

    Every process samples its share of the groups with an engine of its own, then each has all of them. With dynamic
    sampling, groups without variance are left out.
    """

    config: TrainConfig
    client: Client
    tokenizer: EpisodeTokenizer
    pool: RewardPool
    source: TaskSource
    say: Callable[[str], None] = lambda message: None
    unwritten: Unwritten = field(default_factory=Unwritten)
    _said: set[str] = field(default_factory=set)  # reasons

    def check(self) -> None:
        """ValueError, before anything is sampled, where the tasks or the window cannot serve a batch."""
        size, groups = self.source.size, self.config.rollout.groups
        if size is not None and size < groups:
            raise ValueError(f"a step learns from rollout.groups = {groups} tasks, but there are only {size}: lower it")
        question = self.source.training(0).question
        check_window(self.config.agent, question, self.tokenizer, self.client.window, "rollout.max_length")

    async def group(
        self,
        task: Task,
        samples: Sequence[int],
        *,
        judging: bool = False,
        journals: Callable[[str], EpisodeJournal] | None = None,
        min_reward: float = 1.0,
    ) -> list[ScoredTrajectory]:
        """An episode of the task for each of these numbers, which with its group, or id, names the seed.

        For `judging` the document is read whole and conversations are not kept. `journals` gives the journal of an
        episode by its name; from `min_reward` on it is marked to be learned from. An episode that failed scores 0; one
        that failed without its agent's fault is tried once more first. A JournalError or JournalMismatch is raised.
        """
        name, rollout, validation = task.group or task.id, self.config.rollout, self.config.validation
        sampling = SamplingParams(temperature=rollout.temperature)
        if judging:
            sampling = SamplingParams(temperature=validation.temperature, top_p=validation.top_p)
        feed = Feed(task.context, self.tokenizer, len(samples), keep=not judging)
        evidence = await asyncio.to_thread(evidence_of, task)

        async def one(number: int) -> ScoredTrajectory:
            seed = derive_seed(self.config.seed, "validation" if judging else "sample", name, number)
            for attempt in range(_TRIES):
                journal = journals(f"{name}/{number}") if journals else None
                watched = Watched(Diagnosis(evidence, self.tokenizer))
                trajectory = await run_episode(
                    self.config.agent,
                    task,
                    self.client,
                    self.tokenizer,
                    replace(sampling, seed=seed),
                    journal=journal,
                    feed=None if judging and attempt else feed,  # which has let go of what all have had
                    max_chunks=None if judging else rollout.max_chunks,
                    on_turn=watched.add,
                    keep_turns=not judging,
                    limits=self.config.limits,
                )
                if isinstance(trajectory.failure, JournalError | JournalMismatch):
                    raise trajectory.failure
                if breakdown_of(trajectory) is None:
                    break
            scored = await Scorer(self.config.rewards, self.pool).score(task, trajectory, watched)
            if journal:
                journal.score(scored.score(min_reward))
            return scored

        return await asyncio.gather(*map(one, samples))

    def groups(self, tasks: Iterable[Task], samples: int, **options: Any) -> list[ScoredTrajectory]:
        """Groups of several tasks, sampled side by side, in their order; the options are those of `group`."""

        async def side_by_side() -> list[ScoredTrajectory]:
            found = await asyncio.gather(*(self.group(task, range(samples), **options) for task in tasks))
            return [one for group in found for one in group]

        return asyncio.run(side_by_side())

    def local_groups(self, first: int, count: int | None = None, dump: Path | None = None) -> list[ScoredTrajectory]:
        """The groups that fall to this process, of `count` tasks (by default a batch) from number `first` on.

        Their episodes are added to the journal `dump`; where the disk does not take it, they are sampled again without,
        which gives the same.
        """
        rollout = self.config.rollout
        numbers = share_of(range(first, first + (rollout.groups if count is None else count)))
        tasks = [replace(self.source.training(number), group=str(number)) for number in numbers]
        if dump is None:
            return self.groups(tasks, rollout.samples)
        identity = ModelIdentity(self.client.model, weights=dump.stem, tokenizer="its own")
        found: list[ScoredTrajectory] = []
        with self.unwritten.guarding("A FILE OF ROLLOUTS"), Journal(dump) as journal:
            journals = partial(EpisodeJournal, journal, identity=identity, tokenizer=self.tokenizer)
            found = self.groups(tasks, rollout.samples, journals=journals)
        return found or self.groups(tasks, rollout.samples)

    def collect(
        self, first: int, share: Sequence[ScoredTrajectory] | None = None, dump: Path | None = None
    ) -> RolloutBatch:
        """A rollout batch from task number `first` of the training order on; `share` is what this process has of it.

        With dynamic sampling, groups without variance give way to those of the next tasks, `refills` times at most:
        near the ceiling of a task most groups have none, and a batch may stay short.
        """
        config, batch = self.config.rollout, self.batch([])
        for _ in range(1 + (config.refills if self.config.objective.dynamic_sampling else 0)):
            missing = config.groups - len({one.trajectory.group_id for one in batch.kept})
            if not missing:
                break
            own = self.local_groups(first + batch.tasks_drawn, missing, dump) if share is None else share
            share = None
            found = sorted(of_all_processes(own), key=lambda one: int(one.trajectory.group_id))
            batch = self.batch([*batch.sampled, *found])
            _stop_if_broken(batch.sampled)
        self._tell_failures(batch.sampled, "step")
        return batch

    def batch(
        self, sampled: Sequence[ScoredTrajectory], metrics: Mapping[str, float] = MappingProxyType({})
    ) -> RolloutBatch:
        """What there is to learn from these groups. A trajectory that was lost is not one of its group."""
        kept = [one for one in sampled if one.lost is None]
        if self.config.objective.dynamic_sampling:
            outcomes = np.array([one.outcome for one in kept])
            keep = informative(outcomes, [one.trajectory.group_id for one in kept])
            kept = [one for one, differs in zip(kept, keep, strict=True) if differs]
        return RolloutBatch(sampled, kept, len(sampled) // self.config.rollout.samples, metrics)

    def _tell_failures(self, scored: Sequence[ScoredTrajectory], which: str) -> None:
        """Say how many trajectories the machinery lost, and how many failed, with the first reason that is new."""
        lost = [one.lost for one in scored if one.lost is not None]
        failed = [one.trajectory.error for one in scored if one.trajectory.error and one.lost is None]
        for reasons, what in ((lost, "were lost"), (failed, "failed")):
            if new := [reason for reason in reasons if reason not in self._said]:
                self.say(f"{len(reasons)} of {len(scored)} trajectories of the {which} {what}: {new[0]}")
                self._said.update(reasons)

    def validate(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Mean reward, mean over tasks of the best of the samples, and rates of the memory; nothing without tasks."""
        if not tasks:
            return {}
        started, config = time.perf_counter(), self.config.validation
        # Tasks stand in the order of the processes that answered them, which no mean looks at.
        scored = of_all_processes(self.groups(share_of(tasks), config.samples, judging=True))
        rewards = np.array([one.outcome for one in scored]).reshape(-1, config.samples)
        self._tell_failures(scored, "validation")
        return {
            f"val/reward/mean@{config.samples}": float(rewards.mean()),
            f"val/reward/best@{config.samples}": float(rewards.max(axis=1).mean()),
            "val/failed": sum(one.trajectory.error is not None or one.lost is not None for one in scored),
            **{f"val/{name}": rate for name, rate in counters(f for one in scored for f in one.fates).items()},
            "timing_s/testing": time.perf_counter() - started,
        }


def _stop_if_broken(sampled: Sequence[ScoredTrajectory]) -> None:
    """StepError, with the first reason, where most trajectories were lost or none came to its end."""
    lost = [one.lost for one in sampled if one.lost is not None]
    if 2 * len(lost) > len(sampled):
        raise StepError(f"{len(lost)} of {len(sampled)} trajectories could not be finished or scored: {lost[0]}")
    if all(one.trajectory.error for one in sampled):
        raise StepError(f"none of {len(sampled)} trajectories came to its end: {sampled[0].trajectory.error}")


def batch_metrics(batch: RolloutBatch, seconds: float) -> dict[str, float]:
    """What a batch says of rewards, lengths, faults and memories, and what sampling it took, as it is logged."""
    trajectories = [one.trajectory for one in batch.sampled]
    rewards = np.array([one.reward for one in batch.sampled if one.lost is None] or [0.0])
    conversations = [c for trajectory in trajectories for c in trajectory.conversations]
    replies = np.array([c.loss_mask.sum() for c in conversations] or [0])
    lengths = np.array([len(c.token_ids) for c in conversations] or [0])
    counted = sum((Counter(trajectory.counters) for trajectory in trajectories), Counter[str]())
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "response_length/mean": float(replies.mean()),
        "response_length/max": float(replies.max()),
        "prompt_length/mean": float((lengths - replies).mean()),
        "rollout/conversations": len(conversations),
        "rollout/failed": sum(trajectory.error is not None for trajectory in trajectories),
        "rollout/reward_errors": sum(one.reward_error is not None for one in batch.sampled),
        "rollout/lost": sum(one.lost is not None for one in batch.sampled),
        "rollout/broken_conversations": counted["broken_conversations"],
        "rollout/document_tokens": counted["document_tokens"],
        "rollout/truncated_document_tokens": counted["truncated_tokens"],
        "rollout/tasks_drawn": batch.tasks_drawn,
        "rollout/groups_dropped": len({t.group_id for t in trajectories} - {t.group_id for t in batch.trajectories}),
        "rollout/tokens": int(lengths.sum()),
        "rollout/doc_tokens_per_s": counted["document_tokens"] / seconds,
        "memory/truncated": counted["truncated_memories"],
        "memory/empty": counted["empty_updates"],
        **counters(fate for one in batch.sampled for fate in one.fates),
        **reward_means(batch.sampled),
        "timing_s/gen": seconds,
    }
