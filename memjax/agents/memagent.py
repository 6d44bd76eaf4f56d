"""The memory agent: reads a document chunk by chunk, overwrites a bounded memory, and answers from it.

MemAgent (arXiv 2507.02259): every turn is a conversation of its own, so cost is linear in the length of the document.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from memjax.agents.config import AgentConfig, template_tokens
from memjax.agents.prompt_files import MemoryPrompts, load_memory_prompts
from memjax.data.chunks import MIN_CHUNK_TOKENS
from memjax.episodes.episode import Episode, EpisodeTokenizer, Reply
from memjax.rollout.client import Part
from memjax.trajectory import Task


class MemAgent(AgentConfig):
    """Reads with one turn per chunk, whose reply is the next memory, and answers with one more."""

    name: Literal["memagent"] = "memagent"
    chunk: int = Field(default=5000, ge=MIN_CHUNK_TOKENS)
    """Document tokens read in one turn."""
    memory: int = Field(default=1024, ge=1)
    """Longest memory."""
    layout: Literal["memory_first", "chunk_first"] = "memory_first"
    """Order of the bundled prompts; chunk_first lets all questions on a document share a chunk's prefill."""
    prompts: Path | None = None
    """Prompts instead of the bundled ones: a directory, or a Python file of the MemAgent repository."""

    raw_memory: bool = False
    """Whether a memory goes on as it was written, with thinking and the prompt's own tags, as in MemAgent's code."""

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Read the task's context and answer."""
        prompts = self.loaded_prompts
        self.check_memory(episode.tokenizer)
        question = self.asked(task, episode.tokenizer, prompts.tags)
        memory: Part = prompts.no_memory
        async for chunk in episode.chunks(task.context, self.chunk, tags=prompts.tags):
            prompt = prompts.memory.fill({"question": question, "memory": memory, "chunk": chunk.ids})
            reply = await episode.chat(prompt, max_tokens=self.memory, kind="memory", chunk=chunk)
            written = self.carried(reply, episode.tokenizer)
            episode.count("empty_updates", written is None)
            episode.count("truncated_memories", written is not None and reply.truncated)
            memory = memory if written is None else written
        prompt = prompts.final.fill({"question": question, "memory": memory})
        return (await episode.chat(prompt, max_tokens=self.answer, kind="final")).text

    def carried(self, reply: Reply, tokenizer: EpisodeTokenizer) -> Part | None:
        """What of a reply is the next memory: within the budget, which an escaped tag may exceed; None if nothing."""
        part = reply.whole() if self.raw_memory else reply.part(tags=self.loaded_prompts.tags)
        if type(part) is not str:
            return part
        ids = list(islice(tokenizer.encode_stream([part]), self.memory + 1))
        fitting = ids[: tokenizer.char_boundary(ids, self.memory)]
        return part if len(ids) <= self.memory else tokenizer.decode(fitting)

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0) -> dict[str, int]:
        """The parts of a memory turn or of the final one, whichever may become longer."""
        self.check_memory(tokenizer)
        asked, prompts = self.question_tokens(question, tokenizer), self.loaded_prompts
        reading = {
            "chunk": self.chunk,
            "memory": self.memory,
            "question": asked,
            "next memory": self.memory,
            "prompt": template_tokens(prompts.memory, tokenizer),
        }
        answering = {
            "memory": self.memory,
            "question": asked,
            "answer": self.answer,
            "prompt": template_tokens(prompts.final, tokenizer),
        }
        return max(reading, answering, key=lambda parts: sum(parts.values()))

    def check_memory(self, tokenizer: EpisodeTokenizer) -> None:
        """ValueError where the memory has no room for the sentence that stands for an empty one."""
        tokens = tokenizer.count(self.loaded_prompts.no_memory)
        if tokens > self.memory:
            raise ValueError(
                f"the memory budget of {self.memory} tokens does not hold the sentence that stands for an empty memory "
                f"({tokens} tokens): raise it"
            )

    @cached_property
    def loaded_prompts(self) -> MemoryPrompts:
        """The prompts; ValueError for files that hold none."""
        return load_memory_prompts(self.layout, self.prompts)

    @property
    def prompt_hash(self) -> str:
        """A hash of every word of the prompts."""
        return self.loaded_prompts.digest
