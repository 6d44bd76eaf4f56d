"""What it costs to take up a run over a million tokens: CPU-seconds before its first live call, and its journal's size.

    uv run python benchmarks/resume.py TOKENIZER

TOKENIZER is a model directory or a .gguf file. The model is a script that writes memories of the given length, so only
memjax is measured. Beside it another run takes a turn every 5 ms on the same event loop: its longest pause while the
first one is taken up is given with that of an idle loop.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from memjax.agents.registry import DEFAULT
from memjax.data.haystack import BOOKS
from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.episodes.run import run_episode
from memjax.rollout.client import Prompt
from memjax.rollout.identity import ModelIdentity
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams, Task

TOKENS = 1_000_000


class Writer:
    """A model that writes so many tokens of prose, and breaks off at one of its calls."""

    model, window = "script", None

    def __init__(self, tokenizer: Tokenizer, words: list[str], tokens: int, breaks_at: int | None = None):
        self._tokenizer, self._words, self._tokens, self._breaks_at = tokenizer, words, tokens, breaks_at
        self.calls, self.first_call = 0, 0.0

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        self.first_call = self.first_call or time.process_time()
        if self.calls == self._breaks_at:
            raise RuntimeError("broken off")
        self.calls += 1
        dice = random.Random(self.calls)
        start = dice.randrange(len(self._words) - self._tokens)
        ids = self._tokenizer.encode(" ".join(self._words[start : start + self._tokens]))[: self._tokens]
        logprobs = -np.random.default_rng(self.calls).exponential(0.3, len(ids)).astype(np.float32)
        text = self._tokenizer.decode(ids)
        return [Completion(np.zeros(0, np.int32), np.asarray(ids, np.int32), logprobs, text, "stop")]


def main(
    tokenizer: Annotated[str, typer.Argument(help="Model directory or .gguf.")],
    memory: Annotated[int, typer.Option(help="Tokens of every memory.")] = 512,
) -> None:
    tokens_of = Tokenizer.load(tokenizer)
    text = "".join(gzip.decompress(book.read_bytes()).decode() for book in BOOKS)
    while tokens_of.count(text[: 1 << 20]) / (1 << 20) * len(text) < TOKENS:
        text += text
    words = text[:400_000].split()
    text = tokens_of.decode(tokens_of.encode(text[: int(TOKENS * 6)])[:TOKENS])
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(_measure(text, tokens_of, words, memory, Path(scratch) / "journal.jsonl"))))


async def _measure(text: str, tokenizer: Tokenizer, words: list[str], memory: int, path: Path) -> dict[str, object]:
    last = TOKENS // 5000 - 1
    await _drive(text, tokenizer, Writer(tokenizer, words, memory, breaks_at=last), path)
    idle = await _longest_pause(asyncio.sleep(1.0))
    writer = Writer(tokenizer, words, memory)
    started = time.process_time()
    pause = await _longest_pause(_drive(text, tokenizer, writer, path))
    return {
        "document_tokens": TOKENS,
        "memory_tokens": memory,
        "calls_replayed": last,
        "cpu_s_before_first_live_call": round(writer.first_call - started, 2),
        "journal_megabytes": round(path.stat().st_size / 1e6, 2),
        "longest_pause_of_another_run_s": round(pause, 3),
        "longest_pause_idle_s": round(idle, 3),
    }


async def _drive(text: str, tokenizer: Tokenizer, client: Writer, path: Path) -> None:
    journal = await asyncio.to_thread(Journal, path)
    with journal:
        part = EpisodeJournal(journal, "0", ModelIdentity("script", tokenizer="given"), tokenizer)
        task = Task("1", "What happened?", text)
        greedy = SamplingParams(temperature=0.0, seed=0)
        await run_episode(DEFAULT, task, client, tokenizer, greedy, journal=part, keep_turns=False)


async def _longest_pause(work: object) -> float:
    longest, running = 0.0, asyncio.ensure_future(work)  # type: ignore[arg-type]
    while not running.done():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        longest = max(longest, time.perf_counter() - before - 0.005)
    await running
    return longest


if __name__ == "__main__":
    typer.run(main)
