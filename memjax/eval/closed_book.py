"""The closed-book filter: tasks whose question a model answers without the text are no test of reading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memjax.agents.prompt_files import SinglePrompt, load_single_prompt
from memjax.data.chunks import escape_tags
from memjax.data.tasks import read_tasks, write_tasks
from memjax.episodes.episode import EpisodeTokenizer
from memjax.eval.results import digest
from memjax.eval.side_by_side import side_by_side
from memjax.rewards import score
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import Client, ClientError
from memjax.rollout.connect import choose_model, load_tokenizer, open_client
from memjax.trajectory import SamplingParams, Task
from memjax.whole_file import append_line, drop_torn_line

_QUESTION_TOKENS = 1024  # a longer question is not asked, which counts as failed
_PROMPT_TOKENS = 256  # allowed for the prompt and the chat template when a local engine is sized


@dataclass(frozen=True)
class Attempts:
    """How a question is asked: `count` times, or until a reply is right."""

    count: int = 2
    temperature: float = 1.0
    top_p: float = 0.7
    answer_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        self.params()  # refuses settings that no question could be asked with

    def params(self, *path: str | int) -> SamplingParams:
        """How one reply is drawn; `path` names it."""
        seed = int(digest([self.seed, *path])[:7], 16)
        return SamplingParams(self.answer_tokens, self.temperature, self.top_p, seed=seed)


@dataclass(frozen=True)
class Asked:
    """What came of asking one question."""

    id: str
    known: bool
    replies: tuple[str, ...]
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How many tasks there were, and what became of them; those that failed are asked about again."""

    kept: int
    known: int
    failed: int


async def filter_tasks(
    tasks: Path,
    out: Path,
    client: Client,
    tokenizer: EpisodeTokenizer,
    attempts: Attempts,
    concurrency: int,
    on_asked: Callable[[Asked], None] = lambda _: None,
) -> Outcome:
    """Write the tasks that the model does not know by heart to `out`, once every question has been asked.

    What was replied stands in `asked_file(out)`, each reply on disk at once: a killed run continues where it was, and
    questions that could not be asked are asked again. ValueError for a file that another filter began.
    """
    prompt = load_single_prompt("no_context")
    given = f"{tasks.name}, {tasks.stat().st_size} bytes"
    identity = {"model": client.model, "prompt_hash": prompt.digest, "tasks": given, **asdict(attempts)}
    before = _begin(asked_file(out), identity)
    open_tasks = (task for task in read_tasks(tasks) if task.id not in before or before[task.id].error)
    with asked_file(out).open("ab") as file:

        async def ask(task: Task) -> None:
            asked = await _ask(task, client, tokenizer, prompt, attempts)
            append_line(file, asdict(asked))
            before[asked.id] = asked
            on_asked(asked)

        await side_by_side(open_tasks, ask, concurrency)
    failed = sum(asked.error is not None for asked in before.values())
    known = sum(asked.known for asked in before.values())
    if failed:
        return Outcome(0, known, failed)
    kept = write_tasks(out, (task for task in read_tasks(tasks) if not before[task.id].known))
    return Outcome(kept, known, 0)


def asked_file(out: Path) -> Path:
    """Where the replies stand that decided about the tasks of `out`."""
    return out.with_name(f"{out.stem}.asked.jsonl")


def knows(reply: str, answers: Sequence[str]) -> bool:
    """Whether a reply gives one of the answers, in its box or else in what it says."""
    return score("sub_em", extract_answer(reply), answers) >= 1


async def _ask(
    task: Task, client: Client, tokenizer: EpisodeTokenizer, prompt: SinglePrompt, attempts: Attempts
) -> Asked:
    replies: list[str] = []
    try:
        if not task.question.strip() or tokenizer.count(task.question) > _QUESTION_TOKENS:
            raise ValueError(f"the question is empty or has more than {_QUESTION_TOKENS} tokens")
        filled = prompt.answer.fill({"question": escape_tags(task.question, prompt.tags)})
        while len(replies) < attempts.count and not any(knows(reply, task.answers) for reply in replies):
            (completion,) = await client.complete(filled, attempts.params(task.id, len(replies)))
            replies.append(completion.text)
    except (ValueError, ClientError) as failure:  # one question that cannot be asked must not end the others
        return Asked(task.id, False, tuple(replies), str(failure))
    return Asked(task.id, any(knows(reply, task.answers) for reply in replies), tuple(replies))


def _begin(file: Path, identity: Mapping[str, Any]) -> dict[str, Asked]:
    """What was asked before, after a look at whether it was asked in the same way; the first line says how."""
    if file.exists():
        drop_torn_line(file)
    else:
        file.touch()
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]  # in text a reply may hold other line ends
    if not rows:
        with file.open("wb") as begun:
            append_line(begun, identity)
        return {}
    was = rows[0]
    differing = [name for name, value in identity.items() if was.get(name) != value]
    if differing:
        fields = "; ".join(f"{name} was {was.get(name)!r}, is {identity[name]!r}" for name in differing)
        raise ValueError(f"{file} was begun by another filter ({fields}): give another --out")
    return {row["id"]: Asked(row["id"], row["known"], tuple(row["replies"]), row["error"]) for row in rows[1:]}


async def run_filter(
    tasks: Path,
    out: Path,
    model: str | None,
    url: str | None,
    tokenizer: str | None,
    attempts: Attempts,
    concurrency: int,
    on_asked: Callable[[Asked], None],
) -> Outcome:
    """`filter_tasks` with the model that a person named."""
    choice = choose_model(model, url, os.environ)
    length = _QUESTION_TOKENS + attempts.answer_tokens + _PROMPT_TOKENS
    length = min(length, choice.trained_window() or length)
    words = load_tokenizer(choice, tokenizer)
    client = open_client(choice, words, length=length, slots=concurrency, dtype=None)
    try:
        return await filter_tasks(tasks, out, client, words, attempts, concurrency, on_asked)
    finally:
        await client.close()
