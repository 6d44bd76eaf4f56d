"""Documents with one fact and a reader that forgets it with a known probability."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from memjax.agents.memagent import MemAgent
from memjax.episodes.run import Agent
from memjax.eval.results import Row
from memjax.eval.run import Evaluator
from memjax.eval.scoring import PRESETS
from memjax.eval.tasks import Job
from memjax.rewards import metric
from memjax.rewards.pool import RewardPool
from memjax.rewards.transcript import Transcript
from memjax.rollout.client import Client, Prompt
from memjax.rollout.fake import ByteTokenizer, NeedleReader, ScriptedClient
from memjax.rollout.identity import ModelIdentity
from memjax.trajectory import Completion, SamplingParams, Task

CHUNK = 64  # bytes, which are the tokens of the byte tokenizer
PATTERN = r"The code of (?:\w+) is (\d+)\."


def fact_task(number: int, chunks: int, place: int = 0) -> Task:
    """A task whose answer stands in chunk `place` of `chunks`."""
    code = str(100_000 + 7919 * number)
    fact = f"The code of box{number} is {code}."
    pages = [fact if page == place else f"Nothing of note on page {page}." for page in range(chunks)]
    context = "".join(page.ljust(CHUNK) for page in pages)
    return Task(
        f"box{number}",
        f"What is the code of box{number}?",
        context,
        (code,),
        extra={"evidence": [{"text": fact, "start": place * CHUNK, "end": place * CHUNK + len(fact)}]},
    )


def jobs(cell: str, tasks: list[Task]) -> list[Job]:
    return [Job.of(cell, number, task) for number, task in enumerate(tasks)]


READER = MemAgent(question=64, chunk=CHUNK, memory=256, answer=64)
IDENTITY = ModelIdentity("scripted", tokenizer="bytes")


def evaluator(
    client: Client, pool: RewardPool, agent: Agent = READER, preset: str = "greedy", journals: Path | None = None
) -> Evaluator:
    made_by = {"commit": "commit", "config_hash": "config"}
    return Evaluator(client, IDENTITY, agent, ByteTokenizer(), PRESETS[preset], 0, pool, made_by, journals)


def forgetful(forget: float) -> ScriptedClient:
    return ScriptedClient(NeedleReader(PATTERN, forget))


class SlowEvaluator:
    """An evaluator that takes its time and leaves a mark for every sample it begins, with its process."""

    def __init__(self, marks: str) -> None:
        self._marks = marks
        self._inner = evaluator(forgetful(0.1), RewardPool(workers=1))

    async def __call__(self, job: Job) -> Row:
        with open(self._marks, "a") as file:
            file.write(f"{job.number} {os.getpid()}\n")
        await asyncio.sleep(0.3)
        return await self._inner(job)


@dataclass
class Wrapped:
    """A client that lets `before` look at every call, with its number, and raise."""

    client: Client
    before: object
    calls: int = 0
    model: str = "wrapped"
    window: int | None = None

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        self.calls += 1
        self.before(self.calls - 1)  # type: ignore[operator]
        return await self.client.complete(prompt, params)

    async def close(self) -> None:
        pass


def broken_metric(prediction: str, answers: tuple[str, ...]) -> float:
    raise LookupError("no such thing")


@metric(reads="trajectory")
def chunks_read(seen: Transcript) -> float:
    """A metric that looks at the turns."""
    return sum(turn.kind == "memory" and bool(turn.reply) for turn in seen.turns)
