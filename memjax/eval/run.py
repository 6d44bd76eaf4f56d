"""Running samples: each is an episode of its own, scored, and on disk before the next one takes its place."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memjax.episodes.diagnosis import Diagnosis, evidence_of
from memjax.episodes.episode import EpisodeTokenizer, JournalMismatch, Turn, key_order
from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.episodes.limits import Limits
from memjax.episodes.run import Agent, run_episode
from memjax.episodes.transcript import transcript_of, transcript_turn
from memjax.eval.results import ResultsDirectory, Row
from memjax.eval.scoring import Preset, score_answer
from memjax.eval.side_by_side import side_by_side
from memjax.eval.tasks import Job
from memjax.rewards.pool import RewardPool
from memjax.rewards.transcript import TranscriptTurn
from memjax.rollout.client import Client
from memjax.rollout.identity import ModelIdentity
from memjax.trajectory import SamplingParams, Trajectory

Evaluate = Callable[[Job], Awaitable[Row]]

_COUNTED = ("model_calls", "replayed_calls", "prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True)
class Evaluator:
    """Everything that turns a job into a row: `await evaluator(job)` never raises for what the sample did.

    A sample's journal stays in `journals`, so that a killed one resumes there; with None it goes with the sample.
    """

    client: Client
    identity: ModelIdentity
    agent: Agent
    tokenizer: EpisodeTokenizer
    preset: Preset
    seed: int
    pool: RewardPool
    made_by: Mapping[str, Any]  # commit and config_hash, for the rows
    journals: Path | None = None
    limits: Limits = Limits()
    say: Callable[[str], None] = lambda message: None

    async def __call__(self, job: Job) -> Row:
        """Read, extract, score and diagnose one sample."""
        task, preset = job.task, self.preset
        diagnosis = Diagnosis(await asyncio.to_thread(evidence_of, task), self.tokenizer)
        turns: list[TranscriptTurn] = []
        silent: list[bool] = []
        prompts: list[tuple[object, str]] = []  # key, hash

        def take(turn: Turn) -> None:
            turns.append(transcript_turn(turn))
            silent.append(turn.reply.part() is None)
            prompts.append((key_order(turn.key), turn.prompt_hash or ""))
            diagnosis.add(turn)

        started = time.time()
        trajectory = await self._read(job, take)
        extraction = preset.extract(trajectory.answer)
        metric = preset.metrics.get(task.metric, task.metric)
        scores = await score_answer(self.pool, transcript_of(task, trajectory, extraction.answer, turns), metric)
        counts: Mapping[str, Any] = Counter(trajectory.counters)
        read_whole = trajectory.error is None
        return Row(
            cell=job.cell,
            number=job.number,
            task_id=task.id,
            metric=metric,
            metrics=scores.values,
            answers=task.answers,
            response=trajectory.answer,
            extracted=extraction.answer,
            extraction=extraction.how,
            model=self.client.model,
            **self.made_by,
            doc_hash=job.doc_hash,
            prompt_hash=hashlib.sha256("".join(said for _, said in sorted(prompts)).encode()).hexdigest(),
            question=task.question,
            error=trajectory.error,
            metric_errors=scores.errors,
            document_tokens=counts["document_tokens"],
            dropped_tokens=counts["truncated_tokens"],
            **{name: counts[name] for name in _COUNTED},
            truncated_replies=sum(turn.truncated for turn in turns),
            empty_replies=sum(silent),
            started=round(started, 3),
            seconds=round(trajectory.seconds, 3),
            memories=tuple(diagnosis.memories) if read_whole else (),
            fates=diagnosis.fates(correct=scores.values[metric] >= 1) if read_whole else (),
        )

    async def _read(self, job: Job, on_turn: Callable[[Turn], None]) -> Trajectory:
        """Drive the sample's episode; a journal of which nothing can be replayed makes way for a fresh one."""
        sampling = SamplingParams(temperature=self.preset.temperature, top_p=self.preset.top_p, seed=self.seed)
        about = self.agent, job.task, self.client, self.tokenizer, sampling
        drive = partial(run_episode, *about, keep_turns=False, limits=self.limits)
        with tempfile.TemporaryDirectory() as scratch:
            for fresh in (False, True):
                with Journal((self.journals or Path(scratch)) / job.journal, fresh=fresh) as file:
                    journal = EpisodeJournal(file, job.task.id, self.identity, self.tokenizer)
                    trajectory = await drive(journal=journal, on_turn=on_turn)
                if not isinstance(trajectory.failure, JournalMismatch):
                    break
                self.say(f"{job.cell} {job.number} starts over: {trajectory.error}")
        return trajectory


async def run_jobs(
    jobs: Iterable[Job],
    evaluate: Evaluate,
    results: ResultsDirectory,
    concurrency: int,
    on_row: Callable[[Row], None] = lambda row: None,
) -> None:
    """Evaluate what `results` lacks, `concurrency` samples at a time; tasks are made only when a place is free.

    A sample's journal is removed once its row is on disk; that of a failed one stays for the next try.
    """

    def unfinished() -> Iterator[Job]:
        for job in jobs:
            if not results.finished((job.cell, job.number), job.doc_hash):
                yield job
            else:  # a kill may have come between the row and the end of its journal
                (results.journals / job.journal).unlink(missing_ok=True)

    async def work(job: Job) -> None:
        row = results.append(await evaluate(job))
        if row.error is None:
            (results.journals / job.journal).unlink(missing_ok=True)
        on_row(row)

    await side_by_side(unfinished(), work, concurrency)
