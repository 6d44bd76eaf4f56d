"""How many documents of the tiny task a model answers right, by length: one line of JSON for each measurement.

    uv run python benchmarks/tiny_table.py memjax/assets/tiny runs/other/model --out table.jsonl

Every model reads the same documents. What `--out` holds already is not measured again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import typer

from memjax.agents.registry import DEFAULT
from memjax.data.tiny import ASSETS, BUDGETS, WINDOW, TinyTasks
from memjax.episodes.run import run_episode
from memjax.eval.statistics import wilson
from memjax.rewards.answers import extract_answer
from memjax.rollout.local import LocalClient
from memjax.trajectory import SamplingParams, Task, Trajectory

SLOTS = 128
LENGTHS = "8:256,64:256,512:256,4096:64"


def main(
    models: Annotated[list[Path], typer.Argument(help="Model directories, such as RUN/model.")],
    out: Annotated[Path, typer.Option(help="Where the lines go.")],
    lengths: Annotated[
        str, typer.Option(help="CHUNKS:DOCUMENTS with commas between.")
    ] = "8:256,64:256,512:256,4096:64",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    hops: Annotated[int, typer.Option(help="Facts that lead to the answer.")] = 1,
    seed: Annotated[int, typer.Option(help="Of documents and sampling; no training run uses this one.")] = 1000,
) -> None:
    done = {_key(json.loads(line)) for line in out.read_text().splitlines()} if out.exists() else set()
    for model in models:
        for part in lengths.split(","):
            chunks, documents = map(int, part.split(":"))
            cell = {
                "model": str(model),
                "chunks": chunks,
                "documents": documents,
                "temperature": temperature,
                "hops": hops,
                "seed": seed,
            }
            if _key(cell) in done:
                continue
            line = json.dumps(cell | measure(model, chunks, documents, temperature, hops, seed))
            print(line, flush=True)
            with out.open("a") as file:
                file.write(line + "\n")


def measure(model: Path, chunks: int, documents: int, temperature: float, hops: int, seed: int) -> dict[str, object]:
    """The share of right answers with its 95 % interval, and what it took."""
    tasks = TinyTasks(min_chunks=chunks, max_chunks=chunks, hops=hops, seed=seed)
    started, clock = time.process_time(), time.perf_counter()
    right, conversations = asyncio.run(_read_all(model, map(tasks.task, range(documents)), temperature, seed))
    low, high = wilson(right, documents)
    return {
        "right": right,
        "accuracy": round(right / documents, 4),
        "interval": [round(low, 4), round(high, 4)],
        "conversations": conversations,
        "cpu_s": round(time.process_time() - started, 1),
        "wall_s": round(time.perf_counter() - clock, 1),
    }


async def _read_all(model: Path, tasks: Iterator[Task], temperature: float, seed: int) -> tuple[int, int]:
    async with LocalClient.load(model, max_length=WINDOW, slots=SLOTS, dtype=jnp.float32) as client:
        agent = DEFAULT.model_copy(update={**BUDGETS, "prompts": ASSETS / "prompts"})
        sampling = SamplingParams(temperature=temperature, seed=seed)

        async def work() -> list[tuple[Task, Trajectory]]:
            return [  # takes the next one when it is free
                (task, await run_episode(agent, task, client, client.tokenizer, sampling, keep_turns=False))
                for task in tasks
            ]

        read = [pair for pairs in await asyncio.gather(*(work() for _ in range(SLOTS))) for pair in pairs]
    right = sum(extract_answer(trajectory.answer) in task.answers for task, trajectory in read)
    return right, sum(int(trajectory.counters.get("model_calls", 0)) for _, trajectory in read)


def _key(cell: dict[str, object]) -> tuple[object, ...]:
    return tuple(cell[name] for name in ("model", "chunks", "documents", "temperature", "hops", "seed"))


if __name__ == "__main__":
    typer.run(main)
