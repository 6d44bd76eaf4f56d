"""RULER's thirteen tasks at any length: each sample is drawn from its own seed and measured in the model's tokens.

Parameters are those of NVIDIA/RULER and of MemAgent's copy of it; sentences are our own. As in MemAgent the context is
apart from the question and no worked example stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memjax.data.haystack import Haystack
from memjax.data.hotpotqa import Pool, with_length
from memjax.data.lengths import TokenCounter, fit_units, measure
from memjax.data.multihop import Example, Format
from memjax.data.ruler.draft import Draft, DraftText, spans
from memjax.data.ruler.frequency import draft_common_words, draft_frequent_words
from memjax.data.ruler.niah import NiahSpec, draft_niah
from memjax.data.ruler.variables import draft_variables
from memjax.data.seeds import derive_seed
from memjax.trajectory import Task

NIAH: Mapping[str, NiahSpec] = {
    "niah_single_1": NiahSpec("noise"),
    "niah_single_2": NiahSpec("essay"),
    "niah_single_3": NiahSpec("essay", value="uuids"),
    "niah_multikey_1": NiahSpec("essay", keys=4),
    "niah_multikey_2": NiahSpec("needles"),
    "niah_multikey_3": NiahSpec("needles", key="uuids", value="uuids"),
    "niah_multivalue": NiahSpec("essay", values=4),
    "niah_multiquery": NiahSpec("essay", queries=4),
}

ANSWER_TOKENS: Mapping[str, int] = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""The tasks, and how many tokens of the length each sets aside for the answer."""

QUESTIONS: Mapping[str, Format] = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""The tasks that ask the questions of a data set, and its format."""


@dataclass(frozen=True)
class Questions:
    """A data set's questions, and the pool that their contexts are drawn from."""

    examples: tuple[Example, ...]
    pool: Pool


@dataclass(frozen=True)
class Suite:
    """RULER for one tokenizer at one length. `questions` holds the data sets by task (qa_1, qa_2)."""

    tokenizer: TokenCounter
    length: int
    seed: int
    essay: Haystack
    questions: Mapping[str, Questions]

    def guess(self, name: str) -> int:
        """Units that about fill the length, from a draft of its own: what every sample's search starts from.

        Raises ValueError when the task is unknown, cannot be that short, or lacks its data set.
        """
        if name in QUESTIONS:
            self._questions(name)
            return 0
        draft = self._draft(name, derive_seed(self.seed, name, self.length, "guess"))
        probe = max(32, self.length // 200)
        tokens = measure(draft.pieces(probe), self.tokenizer)
        return self._fit(name, draft, max(1, probe * self.length // max(1, tokens)))[0]

    def sample(self, name: str, index: int, guess: int) -> Task:
        """Sample `index` of a task, with at most `length` tokens for context, question and answer together.

        It depends on the suite's seed and on `index`, not on the other samples; questions come in file order, as
        upstream. Raises ValueError when the length is too short for the task or the data set too small for the length.
        """
        seed = derive_seed(self.seed, name, self.length, index)
        task_id = f"{name}-{self.length}-{index}"
        if name in QUESTIONS:
            return self._question(name, task_id, index, seed)
        draft = self._draft(name, seed)
        units, tokens = self._fit(name, draft, guess)
        text = DraftText(task_id, draft, units)
        extra = {
            "task": name,
            "seed": seed,
            "length": tokens,
            "max_length": self.length,
            "context_tokens": tokens - self._reserved(name, draft),
            "evidence": spans(text),
        }
        if name in NIAH and NIAH[name].haystack == "essay":
            extra["haystack_readings"] = self.essay.readings(units)
        return Task(task_id, draft.question, text, draft.answers, metric="ruler_all", extra=extra)

    def _draft(self, name: str, seed: int) -> Draft:
        match name:
            case "vt":
                return draft_variables(seed)
            case "cwe":
                return draft_common_words(seed, self.length)
            case "fwe":
                return draft_frequent_words(seed, self.length)
        if name not in NIAH:
            raise ValueError(f"unknown RULER task {name!r}: choose among {', '.join(ANSWER_TOKENS)}")
        return draft_niah(NIAH[name], seed, self.essay)

    def _fit(self, name: str, draft: Draft, guess: int) -> tuple[int, int]:
        """Units within the length, and the tokens that they make with question and answer."""
        reserved = self._reserved(name, draft)

        def tokens_of(units: int) -> int:
            return measure(draft.pieces(units), self.tokenizer) + reserved

        try:
            return fit_units(tokens_of, self.length, guess)
        except ValueError as error:
            raise ValueError(f"{name} does not fit {self.length} tokens: {error}") from error

    def _reserved(self, name: str, draft: Draft) -> int:
        return self.tokenizer.count(draft.question) + ANSWER_TOKENS[name]

    def _question(self, name: str, task_id: str, index: int, seed: int) -> Task:
        questions = self._questions(name)
        if index >= len(questions.examples):
            raise ValueError(f"{name} has {len(questions.examples)} questions: ask for no more samples than that")
        example = questions.examples[index]
        task = with_length(example, questions.pool, self.length, seed, answer_tokens=ANSWER_TOKENS[name])
        extra = {"task": name, "example": example.id, "max_length": self.length, **task.extra}
        return Task(task_id, task.question, task.context, task.answers, metric="ruler_part", extra=extra)

    def _questions(self, name: str) -> Questions:
        if name not in self.questions:
            raise ValueError(f"{name} asks questions of a {QUESTIONS[name]} file: give one")
        return self.questions[name]
