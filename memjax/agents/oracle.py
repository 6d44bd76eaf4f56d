"""The baseline that is shown only what the question needs: the most that finding and keeping could be worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from memjax.agents.single import Single
from memjax.data.corpus import Documents
from memjax.data.evidence import passages
from memjax.episodes.episode import Episode, EpisodeTokenizer
from memjax.trajectory import Task

_WINDOW = 8192  # a question's own paragraphs have about 1,500 tokens


class Oracle(Single):
    """Shows the model the question's own paragraphs at once."""

    name: Literal["oracle"] = "oracle"  # type: ignore[assignment]

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Answer from the paragraphs that came with the question."""
        return await super().__call__(replace(task, context=own_text(task)), episode)

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0) -> dict[str, int]:
        """The parts of the only turn, whose text does not grow with the document."""
        return super().longest_turn(question, tokenizer, min(document_tokens, _WINDOW))


def own_text(task: Task) -> str:
    """The paragraphs that came with the question, else the passages that hold the answer; ValueError for neither."""
    own, context = task.extra.get("own"), task.context
    if own and isinstance(context, Documents):
        return "".join(Documents(context.corpus, tuple(context.numbers[i - 1] for i in own)).pieces())
    if found := passages(task):
        return "\n\n".join(text.strip() for _, text in found)
    raise ValueError(f"task {task.id!r} does not say which passages hold its answer, so there is no oracle for it")
