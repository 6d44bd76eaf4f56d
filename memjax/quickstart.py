"""The quickstarts: the bundled tiny model on a document of 2,001 windows, or any model on a page of prose."""

from __future__ import annotations

import asyncio
from importlib import resources

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memjax.agents.registry import DEFAULT
from memjax.ask import Output, ask
from memjax.data.tiny import ASSETS, BUDGETS, CAPACITY, CHUNK_WORDS, WINDOW, TinyTasks, facts_in
from memjax.episodes.episode import Turn
from memjax.episodes.run import run_episode
from memjax.rewards.answers import extract_answer
from memjax.rollout.connect import LocalModel, open_client
from memjax.tokenizer import Tokenizer
from memjax.trajectory import SamplingParams, Task

CHUNKS = 2001 * WINDOW // CHUNK_WORDS  # over 2,000 windows
_SEED = 7
_QUESTION, _ANSWER = "What is the code of the lamp room door?", "7093"


def run_tiny_quickstart() -> None:
    """Read a generated document with the bundled model, and print the answer beside the expected one."""
    task = TinyTasks(min_chunks=CHUNKS, max_chunks=CHUNKS, seed=_SEED).task(0)
    assert isinstance(task.context, str)
    words, facts = CHUNKS * CHUNK_WORDS, facts_in(task.context)
    key, value = facts[0]
    print(
        f"Model:    bundled, 90,000 parameters; it sees {WINDOW} tokens at a time and remembers {CAPACITY} facts\n"
        f'Document: {words:,} tokens, {words // WINDOW:,} windows; in it {len(facts):,} facts like "{key} {value} ."\n'
        f"Question: {task.question}",
        flush=True,
    )
    answer = asyncio.run(_read(task, Console(stderr=True)))
    (expected,) = task.answers
    print(f"Answer:   {answer or '(the reply was empty)'}\nExpected: {expected}")
    print(f"Result:   {'right' if answer == expected else 'wrong'}")


async def _read(task: Task, console: Console) -> str:
    """The answer; on the way every change of the memory is told."""
    tokenizer = Tokenizer.load(ASSETS)
    with console.status("loading the model"):
        client = open_client(LocalModel(str(ASSETS)), tokenizer, length=WINDOW, slots=1, dtype="float32")
    agent = DEFAULT.model_copy(update={**BUDGETS, "prompts": ASSETS / "prompts"})
    columns = TextColumn("chunks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    memory = ""
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            reads = bar.add_task("", total=CHUNKS)

            def on_turn(turn: Turn) -> None:
                nonlocal memory
                bar.advance(reads)
                written = turn.reply.text.strip()
                if turn.chunk is not None and written and written != memory:
                    memory = written
                    told = f"chunk {turn.chunk.index + 1:,} of {CHUNKS:,}: the memory is now {memory}"
                    console.print(told, highlight=False)

            sampling = SamplingParams(temperature=0.0, seed=_SEED)
            read = await run_episode(agent, task, client, tokenizer, sampling, on_turn=on_turn, keep_turns=False)
    finally:
        await client.close()
    if read.failure is not None:
        raise read.failure
    return extract_answer(read.answer)


def run_quickstart(model: str | None, url: str | None, tokenizer: str | None) -> None:
    """Read the bundled page of prose with any model, and print the answer beside the expected one."""
    text = resources.files("memjax") / "assets" / "quickstart" / "harrow_light.txt"
    given = {"questions": [_QUESTION], "files": [str(text)], "model": model, "url": url, "tokenizer": tokenizer}
    budgets = {"chunk": 700, "memory": 160, "answer": 160, "question": 64}  # small, so that a page takes several chunks
    print(f"Question: {_QUESTION}", flush=True)
    _, (asked,) = ask(given, budgets, Output(show_memory=True, fresh=True), Console(stderr=True))
    answer = str(asked.to_json()["answer"])
    expected = "as expected"
    if _ANSWER not in answer:
        expected = "not the expected answer: a small model that was not trained to keep a memory often fails here"
    print(f"Answer:   {answer or '(the reply was empty)'}\nExpected: {_ANSWER}\nResult:   {expected}")
