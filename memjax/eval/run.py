"""Running samples: each is read by an agent, scored, and on disk before the next one takes its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from memjax.agents.base import Agent
from memjax.eval.diagnosis import diagnose, evidence_of
from memjax.eval.recording import RecordingClient, Turn
from memjax.eval.results import ResultsDirectory, Row, digest
from memjax.eval.scoring import Preset, score_answer
from memjax.eval.side_by_side import side_by_side
from memjax.rewards.pool import RewardPool, check_metric
from memjax.rollout.client import Client
from memjax.trajectory import Task, Trajectory


@dataclass(frozen=True)
class Job:
    """One sample to be run: its place in the results, and its task."""

    cell: str
    number: int
    task: Task
    doc_hash: str  # tells this task from another one at the same place

    @classmethod
    def of(cls, cell: str, number: int, task: Task) -> Job:
        """The job of a task; a context that streams is known by what its data set says about it."""
        context = task.context if isinstance(task.context, str) else task.context.name
        known = [task.id, task.question, list(task.answers), task.metric, context, dict(task.extra)]
        return cls(cell, number, task, digest(known))


Evaluate = Callable[[Job], Awaitable[Row]]


@dataclass(frozen=True)
class Evaluator:
    """Everything that turns a job into a row: `await evaluator(job)` never raises for what the sample did."""

    client: Client
    agent: Agent
    decode: Callable[[Sequence[int]], str]
    preset: Preset
    pool: RewardPool
    commit: str
    config_hash: str

    async def __call__(self, job: Job) -> Row:
        """Read, extract, score and diagnose one sample."""
        evidence = await asyncio.to_thread(evidence_of, job.task)
        recorder = RecordingClient(self.client, self.decode, job.task.question, [fact.texts for fact in evidence])
        started, clock = time.time(), time.perf_counter()
        trajectory = await self._attempt(job, recorder)
        seconds = time.perf_counter() - clock

        response = "" if trajectory.error else (recorder.turns[-1].text if recorder.turns else trajectory.answer)
        extraction = self.preset.extract(response)
        metric = self.preset.metrics.get(job.task.metric, job.task.metric)
        scores = await score_answer(self.pool, response, extraction.answer, job.task.answers, metric)
        reading = _memory_turns(trajectory, recorder.turns)
        counts = trajectory.counters
        return Row(
            cell=job.cell,
            number=job.number,
            task_id=job.task.id,
            metric=metric,
            metrics=scores.values,
            answers=job.task.answers,
            response=response,
            extracted=extraction.answer,
            extraction=extraction.how,
            model=self.client.model,
            commit=self.commit,
            config_hash=self.config_hash,
            doc_hash=job.doc_hash,
            prompt_hash=recorder.prompt_hash,
            question=job.task.question,
            error=trajectory.error,
            metric_errors=scores.errors,
            document_tokens=int(counts.get("document_tokens", 0)),
            dropped_tokens=int(counts.get("truncated_tokens", 0)),
            model_calls=len(recorder.turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in recorder.turns),
            cached_tokens=sum(turn.cached_tokens for turn in recorder.turns),
            generated_tokens=sum(turn.completion_tokens for turn in recorder.turns),
            truncated_replies=sum(turn.truncated for turn in recorder.turns),
            started=round(started, 3),
            seconds=round(seconds, 3),
            memories=tuple(turn.text for turn in reading),
            fates=diagnose(evidence, reading, correct=scores.values[metric] >= 1) if reading else (),
        )

    async def close(self) -> None:
        """Release the client and end the scoring processes."""
        await self.client.close()
        await asyncio.to_thread(self.pool.close)

    async def _attempt(self, job: Job, client: Client) -> Trajectory:
        """The boundary at which whatever goes wrong with one sample becomes that sample's recorded failure."""
        task = job.task
        try:
            return await self.agent.run(task, client)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Trajectory(task.id, task.group or task.id, (), answer="", error=reason)


async def run_jobs(
    jobs: Iterable[Job],
    evaluate: Evaluate,
    results: ResultsDirectory,
    concurrency: int,
    on_row: Callable[[Row], None] = lambda row: None,
) -> None:
    """Evaluate what `results` lacks, `concurrency` samples at a time; tasks are made only when a place is free."""

    async def work(job: Job) -> None:
        on_row(results.append(await evaluate(job)))

    await side_by_side(_unfinished(jobs, results), work, concurrency)


def check_task(task: Task) -> None:
    """Refuse a task that could not be scored, before the model has read it."""
    check_metric(task.metric)
    if not any(answer.strip() for answer in task.answers):
        raise ValueError(f"task {task.id!r} has no gold answer; an evaluation needs one")


def _unfinished(jobs: Iterable[Job], results: ResultsDirectory) -> Iterator[Job]:
    for job in jobs:
        check_task(job.task)
        if not results.finished((job.cell, job.number), job.doc_hash):
            yield job


def _memory_turns(trajectory: Trajectory, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns that wrote a memory, one per chunk; none where the text was not read to its end."""
    if trajectory.error or len(turns) != len(trajectory.conversations):
        return ()
    return tuple(turn for turn, talk in zip(turns, trajectory.conversations, strict=True) if talk.kind == "memory")
