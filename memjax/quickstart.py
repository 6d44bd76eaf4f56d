"""The quickstart that needs nothing: a bundled tiny model reads a document two thousand times as long as its window."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memjax.agents.base import Budgets
from memjax.agents.memagent import MemAgent
from memjax.agents.prompt_files import load_memory_prompts
from memjax.data.tiny import ASSETS, BUDGETS, CAPACITY, CHUNK_WORDS, WINDOW, TinyTasks, facts_in
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import Client
from memjax.rollout.connect import LocalModel, open_client
from memjax.tokenizer import Tokenizer
from memjax.trajectory import SamplingParams, Task

CHUNKS = 2001 * WINDOW // CHUNK_WORDS  # over 2,000 windows
_SEED = 7


def run_tiny_quickstart() -> None:
    """Read a generated document, and print the answer beside the expected one."""
    chunks = CHUNKS
    task = TinyTasks(min_chunks=chunks, max_chunks=chunks, seed=_SEED).task(0)
    assert isinstance(task.context, str)
    words, facts = chunks * CHUNK_WORDS, facts_in(task.context)
    key, value = facts[0]
    print(
        f"Model:    bundled, 90,000 parameters; it sees {WINDOW} tokens at a time and remembers {CAPACITY} facts\n"
        f'Document: {words:,} tokens, {words // WINDOW:,} windows; in it {len(facts):,} facts like "{key} {value} ."\n'
        f"Question: {task.question}",
        flush=True,
    )
    console = Console(stderr=True)
    tokenizer = Tokenizer.load(ASSETS)
    with console.status("loading the model"):
        client = open_client(LocalModel(str(ASSETS)), tokenizer, length=WINDOW, slots=1, dtype="float32")
    prompts = load_memory_prompts("memory_first", ASSETS / "prompts")
    agent = MemAgent(tokenizer, prompts, Budgets(**BUDGETS), SamplingParams(temperature=0.0))
    answer = asyncio.run(_read(agent, task, client, console, chunks))
    (expected,) = task.answers
    print(f"Answer:   {answer or '(the reply was empty)'}\nExpected: {expected}")
    print(f"Result:   {'right' if answer == expected else 'wrong'}")


async def _read(agent: MemAgent, task: Task, client: Client, console: Console, chunks: int) -> str:
    """The answer; on the way every change of the memory is told."""
    columns = TextColumn("chunks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    reading = agent.start(task.question)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            reads = bar.add_task("", total=chunks)
            for chunk in agent.chunks(task.context):
                before = reading.memory_text
                reading, _ = await agent.read_chunk(reading, chunk, client)
                bar.advance(reads)
                if reading.memory_text.strip() != before.strip():
                    line = f"chunk {chunk.index + 1:,} of {chunks:,}: the memory is now {reading.memory_text.strip()}"
                    console.print(line, highlight=False)
        turn = await agent.answer(reading, client)
    finally:
        await client.close()
    return extract_answer(turn.completion.text)
