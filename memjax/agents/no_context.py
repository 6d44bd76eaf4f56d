"""The baseline without a text: what the model knows by heart."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal

from memjax.agents.prompt_files import SinglePrompt, load_single_prompt
from memjax.agents.single import Single
from memjax.episodes.episode import Episode, EpisodeTokenizer
from memjax.trajectory import Task


class NoContext(Single):
    """Shows the model the question alone."""

    needs_document: ClassVar[bool] = False

    name: Literal["no-context"] = "no-context"  # type: ignore[assignment]

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Answer the question."""
        return await self.answered((), task, episode)

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0) -> dict[str, int]:
        """The parts of the only turn."""
        return super().longest_turn(question, tokenizer, 0)

    @cached_property
    def prompt(self) -> SinglePrompt:
        """The prompt."""
        return load_single_prompt("no_context")
