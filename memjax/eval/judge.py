"""A model that judges the answers of finished runs, through any client."""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import IO

from memjax.data.chunks import escape_tags
from memjax.eval.results import ResultsDirectory, Row, digest
from memjax.eval.side_by_side import side_by_side
from memjax.eval.verdicts import FILE, Ruling, Verdict, read_verdicts, ruling
from memjax.rollout.client import Client, ClientError, Message, Prompt
from memjax.rollout.connect import choose_model, load_tokenizer, open_client
from memjax.trajectory import SamplingParams
from memjax.whole_file import append_line, drop_torn_line

REPLY_TOKENS = 256
WINDOW_TOKENS = 4096  # instructions, question, references, answer and reply

_TAGS = ("question", "reference", "answer")
_VERDICT = re.compile(r"\bverdict\W{0,8}(right|wrong)\b", re.IGNORECASE)


@dataclass(frozen=True)
class JudgePrompt:
    """The judge's instructions, with $question, $references and $answer."""

    text: string.Template

    @classmethod
    def load(cls) -> JudgePrompt:
        """Ours."""
        return cls(string.Template((resources.files("memjax.eval") / "prompts" / "judge.txt").read_text("utf-8")))

    @property
    def digest(self) -> str:
        """A hash of every word."""
        return digest(self.text.template)

    def about(self, question: str, references: Sequence[str], answer: str) -> Prompt:
        """The prompt about one answer, which cannot close the section that it stands in."""
        text = self.text.substitute(
            question=escape_tags(question, _TAGS),
            references=escape_tags("\n".join(references), _TAGS),
            answer=escape_tags(answer, _TAGS),
        )
        return Prompt((Message("user", (text,)),))


def ruling_of(reply: str) -> Ruling:
    """The last verdict of a reply; a reply without one is unclear."""
    found = _VERDICT.findall(reply)
    if not found:
        return "unclear"
    return "right" if found[-1].lower() == "right" else "wrong"


async def judge_run(
    directory: Path, client: Client, concurrency: int, on_verdict: Callable[[Verdict], None] = lambda _: None
) -> None:
    """Ask about every answer of a results directory that has no verdict yet, and put the score into its results.json.

    A verdict is on disk at once, so a killed pass continues there; those that failed are asked for again. Samples
    without an answer are wrong without being asked about. ValueError where another judge has been.
    """
    config = directory / "config.json"
    if not config.is_file():
        raise ValueError(f"{directory} has no config.json: give a directory that `memjax eval` wrote with --out")
    prompt = JudgePrompt.load()
    with ResultsDirectory(directory, json.loads(config.read_text("utf-8"))) as results:
        verdicts = read_verdicts(directory)
        _refuse_other_judge(directory, verdicts.values(), client.model, prompt.digest)
        rows = [row for _, row in sorted(results.rows.items()) if ruling(row, verdicts) in ("missing", "failed")]
        (directory / FILE).touch()
        drop_torn_line(directory / FILE)
        with (directory / FILE).open("ab") as file:
            await _ask_about(rows, client, prompt, concurrency, file, on_verdict)
        if (directory / "results.json").is_file():
            results.finish()


async def judge_runs(directories: Sequence[Path], model: str | None, url: str | None, concurrency: int) -> None:
    """`judge_run` on each of the directories, with the model that a person named."""
    choice = choose_model(model, url, os.environ)
    length = min(WINDOW_TOKENS, choice.trained_window() or WINDOW_TOKENS)
    client = open_client(choice, load_tokenizer(choice, None), length=length, slots=concurrency, dtype=None)
    try:
        for directory in directories:
            await judge_run(directory, client, concurrency)
    finally:
        await client.close()


async def _ask_about(
    rows: Sequence[Row],
    client: Client,
    prompt: JudgePrompt,
    concurrency: int,
    file: IO[bytes],
    on_verdict: Callable[[Verdict], None],
) -> None:
    async def ask(row: Row) -> None:
        verdict = await _verdict(row, client, prompt)
        append_line(file, asdict(verdict))
        on_verdict(verdict)

    await side_by_side(iter(rows), ask, concurrency)


async def _verdict(row: Row, client: Client, prompt: JudgePrompt) -> Verdict:
    said: Ruling = "failed"
    reply, error = "", None
    try:
        question = prompt.about(row.question, row.answers, row.extracted)
        (completion,) = await client.complete(question, SamplingParams(max_tokens=REPLY_TOKENS, temperature=0, seed=0))
        reply = completion.text
        said = ruling_of(reply)
    except (ValueError, ClientError) as failure:  # one answer that cannot be judged must not end the others
        error = str(failure)
    return Verdict(row.cell, row.number, row.extracted, client.model, prompt.digest, said, reply, error)


def _refuse_other_judge(directory: Path, verdicts: Iterable[Verdict], model: str, prompt_hash: str) -> None:
    for verdict in verdicts:
        if verdict.judge != model:
            raise ValueError(
                f"{directory} was judged by {verdict.judge}, not by {model}: remove its {FILE} to judge it again"
            )
        if verdict.prompt_hash != prompt_hash:
            raise ValueError(f"{directory} was judged with other instructions: remove its {FILE} to judge it again")
