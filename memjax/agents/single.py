"""The baselines with one turn: the whole text in the window, or as much of its two ends as fits."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from memjax.agents.config import AgentConfig, template_tokens
from memjax.agents.prompt_files import SinglePrompt, load_single_prompt
from memjax.data.chunks import MIN_CHUNK_TOKENS
from memjax.episodes.episode import Episode, EpisodeTokenizer
from memjax.trajectory import Task

_TOKENS_AT_ONCE = 4096  # in which a text is taken in


class Single(AgentConfig):
    """Shows the model the whole text and the question at once; a text past the window is refused."""

    name: Literal["single"] = "single"

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Answer from the text."""
        room, total = self.room(task, episode), 0
        ids: list[int] = []
        async for chunk in episode.chunks(task.context, _TOKENS_AT_ONCE, tags=self.prompt.tags):
            total += len(chunk.ids)
            if room is None or total <= room:
                ids += chunk.ids
        if room is not None and total > room:
            raise ValueError(
                f"the text has {total} tokens, but beside the question and an answer of {self.answer} the window of "
                f"{episode.model} ({episode.window}) holds {max(0, room)}: read it with --agent memagent"
            )
        return await self.answered(tuple(ids), task, episode)

    async def answered(self, ids: tuple[int, ...], task: Task, episode: Episode) -> str:
        """The reply to the question beside the text with these ids."""
        question = self.asked(task, episode.tokenizer, self.prompt.tags)
        prompt = self.prompt.answer.fill({"question": question, "text": ids})
        return (await episode.chat(prompt, max_tokens=self.answer, kind="final")).text

    def room(self, task: Task, episode: Episode) -> int | None:
        """The tokens of the window that are left for text; None where the window is not known."""
        if episode.window is None:
            return None
        return episode.window - sum(self.longest_turn(task.question, episode.tokenizer).values())

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0) -> dict[str, int]:
        """The parts of the only turn."""
        asked = self.question_tokens(question, tokenizer)
        template = template_tokens(self.prompt.answer, tokenizer)
        return {"text": document_tokens, "question": asked, "answer": self.answer, "prompt": template}

    @cached_property
    def prompt(self) -> SinglePrompt:
        """The prompt."""
        return load_single_prompt()

    @property
    def prompt_hash(self) -> str:
        """A hash of every word of the prompt."""
        return self.prompt.digest


class SingleTruncated(Single):
    """As `single`, but a text longer than the window loses its middle, as in the baselines of the published tables."""

    name: Literal["single-truncated"] = "single-truncated"  # type: ignore[assignment]

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Answer from the two ends of the text; the tokens left out are counted as `truncated_tokens`."""
        room = self.room(task, episode)
        if room is None:
            raise ValueError(f"the window of {episode.model} is not known, so no text can be cut to it: give --window")
        if room < MIN_CHUNK_TOKENS:
            raise ValueError(
                f"the window of {episode.model} ({episode.window} tokens) leaves {room} for a text: raise --window"
            )
        ids: tuple[int, ...] = ()
        async for chunk in episode.chunks(task.context, room, tags=self.prompt.tags, max_chunks=1):
            ids = chunk.ids
        return await self.answered(ids, task, episode)
