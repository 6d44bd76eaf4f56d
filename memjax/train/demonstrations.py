"""Readings by a teacher, or by the model itself, of which the good ones are kept to be learned from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from memjax.data import tiny
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import Client, Prompt
from memjax.rollout.connect import LocalModel, ModelChoice, open_client
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_tokenizer_files
from memjax.train.config import TINY, TaskConfig, TrainConfig
from memjax.train.learner import make_agent
from memjax.train.rollouts import TaskSource, attempt_task
from memjax.train.sft import written
from memjax.train.trajectory_files import TrajectoryFile, row_of
from memjax.trajectory import Completion, SamplingParams, Task

Progress = Callable[[int, int], None]
"""Called with the readings that are done and those that are kept."""


@dataclass(frozen=True)
class TeacherClient:
    """A service whose replies are taken as if the student had written them: in its ids, and cut at its budget."""

    service: Client
    tokenizer: Tokenizer

    @property
    def model(self) -> str:
        """The service's name."""
        return self.service.model

    @property
    def window(self) -> int | None:
        """The service's, in its own tokens."""
        return self.service.window

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """The service's texts in the student's ids."""
        ids = self.tokenizer.render_prompt(prompt).ids
        completions = await self.service.complete(prompt, params)
        return [written(ids, c, self.tokenizer, params.max_tokens) for c in completions]

    async def close(self) -> None:
        """Close the service."""
        await self.service.close()


@dataclass(frozen=True)
class Plan:
    """Which readings are made, by whom, and from which reward on one is kept."""

    tasks: TaskConfig
    teacher: str  # as the file names it
    limit: int | None = None
    samples: int = 1
    min_reward: float = 1.0

    def first_tasks(self, seed: int) -> list[Task]:
        """The tasks that are read."""
        source = TaskSource(self.tasks, seed)
        count = source.size if self.limit is None else self.limit
        if count is None:
            raise ValueError("the tiny task has no end: say with --limit how many documents to read")
        return source.first(count)


def open_teacher(config: TrainConfig, choice: ModelChoice, student: Tokenizer) -> Client:
    """A client that replies in the student's ids. ValueError for a local model that has others."""
    if isinstance(choice, LocalModel):
        _refuse_other_ids(choice.model, student)
    client = open_client(choice, student, length=config.rollout.max_length, slots=config.rollout.slots, dtype=None)
    return client if isinstance(choice, LocalModel) else TeacherClient(client, student)


def make_demonstrations(
    config: TrainConfig, student: Tokenizer, teacher: Client, plan: Plan, out: Path, progress: Progress | None = None
) -> tuple[int, int]:
    """Read the plan's tasks as the config's agent does, and write the good readings to `out`; (kept, failed).

    A file that is there already is gone on with. The teacher is closed.
    """
    temperature = config.rollout.temperature
    agent = make_agent(config, student, max_chunks=config.agent.max_chunks)
    agent = replace(agent, sampling=SamplingParams(temperature=temperature))
    made_with = {
        "teacher": plan.teacher,
        "agent": config.agent.model_dump(mode="json"),
        "temperature": temperature,
        "seed": config.seed,
        "min_reward": plan.min_reward,
    }
    with TrajectoryFile(out, made_with) as file, RewardPool() as pool:
        wanted = [(task, i) for task in plan.first_tasks(config.seed) for i in range(plan.samples)]
        missing = iter([(task, i) for task, i in wanted if not file.holds(task.id, i)])

        async def read_on() -> None:
            for task, i in missing:
                attempt = await attempt_task(agent, task, teacher, pool, i, config.seed)
                good = attempt.trajectory.error is None and attempt.reward >= plan.min_reward
                file.add(row_of(attempt, i, keep=good))
                if progress:
                    progress(file.made, file.kept)

        async def read_side_by_side() -> None:
            try:
                await asyncio.gather(*(read_on() for _ in range(config.rollout.slots)))
            finally:
                await teacher.close()

        asyncio.run(read_side_by_side())
        return file.kept, file.failed


def student_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of the model that a config trains."""
    if config.model != TINY:
        return Tokenizer.load(config.model)
    tiny.write_tokenizer(config.out / TINY)
    return Tokenizer.load(config.out / TINY)


def _refuse_other_ids(model: str, student: Tokenizer) -> None:
    definition, settings, source = read_tokenizer_files(model)
    teacher = Tokenizer(definition, settings, source)
    probe = "".join(map(chr, range(32, 0x2FF)))
    if (teacher.size, teacher.eos_ids, teacher.encode(probe)) != (student.size, student.eos_ids, student.encode(probe)):
        raise ValueError(
            f"{model} has other token ids than the model that is to learn ({student.source}): run it behind an "
            "endpoint (memjax serve) and give that with --url, so that its text is encoded anew"
        )
