"""The memory agent: reads a document chunk by chunk, rewrites a bounded memory, and answers from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memjax.agents.base import (
    JOINT_TOKENS,
    AgentTokenizer,
    Budgets,
    Turn,
    conversations_of,
    generation_counters,
    question_tokens,
    take_turn,
    turn_params,
)
from memjax.agents.prompt_files import MemoryPrompts, Template, load_memory_prompts
from memjax.data.chunks import MIN_CHUNK_TOKENS, Chunk, neutralise, read_chunks
from memjax.rollout.client import Client, ClientError, Part
from memjax.trajectory import SamplingParams, Task, TextSource, Trajectory

FINAL_STEP = -1


@dataclass(frozen=True)
class Reading:
    """How far one question has come, and what it remembers."""

    question: str
    memory_ids: tuple[int, ...] = ()  # as the model drew them; empty where a service gives text only
    memory_text: str = ""
    chunks_read: int = 0
    empty_updates: int = 0  # replies without text, after which the old memory stayed
    truncated_memories: int = 0  # memories that ended at their budget


@dataclass(frozen=True)
class MemAgent:
    """Reads with one model call per chunk and answers with one more.

    The loop is `start`, then `read_chunk` for each of `chunks`, then `answer`; `run` is that loop for one task. With
    `max_chunks` a longer document loses its middle, which is counted. `sampling.seed` fixes the whole trajectory, None
    makes it fresh; `sampling.max_tokens` gives way to the budgets.
    """

    tokenizer: AgentTokenizer
    prompts: MemoryPrompts = field(default_factory=load_memory_prompts)
    budgets: Budgets = field(default_factory=Budgets)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_chunks: int | None = None

    def __post_init__(self) -> None:
        tokens = self.tokenizer.count(self.prompts.no_memory)
        if tokens > self.budgets.memory:
            raise ValueError(
                f"the memory budget of {self.budgets.memory} tokens does not hold the sentence that stands for an "
                f"empty memory ({tokens} tokens): raise it"
            )

    def start(self, question: str) -> Reading:
        """The state before the first chunk; ValueError for a question over its budget."""
        question_tokens(question, self.budgets.question, self.tokenizer)
        return Reading(question)

    def check_window(self, question: str, window: int | None, model: str) -> None:
        """ValueError, with the numbers, where the longest conversation would not fit the window of the model."""
        need = self.window_needed(question)
        if window is None or need <= window:
            return
        parts = self._longest_turn(question)
        advice = "lower the chunk, memory and answer budgets"
        if (room := parts.get("chunk", 0) - (need - window)) >= MIN_CHUNK_TOKENS:
            advice = f"lower the chunk budget to {room} or less, or the memory budget"
        listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
        raise ValueError(f"{listed} = {need} tokens, but the window of {model} holds {window}: {advice}")

    def window_needed(self, question: str) -> int:
        """The tokens of the longest conversation about a question, prompt and reply together."""
        return sum(self._longest_turn(question).values())

    def _longest_turn(self, question: str) -> dict[str, int]:
        return max(self._memory_turn(question), self._final_turn(question), key=lambda parts: sum(parts.values()))

    def _memory_turn(self, question: str) -> dict[str, int]:
        return {
            "chunk": self.budgets.chunk,
            "memory": self.budgets.memory,
            "question": self._question_tokens(question),
            "next memory": self.budgets.memory,
            "prompt": self._template_tokens(self.prompts.memory),
        }

    def _final_turn(self, question: str) -> dict[str, int]:
        return {
            "memory": self.budgets.memory,
            "question": self._question_tokens(question),
            "answer": self.budgets.answer,
            "prompt": self._template_tokens(self.prompts.final),
        }

    def _question_tokens(self, question: str) -> int:
        return question_tokens(question, self.budgets.question, self.tokenizer)

    def _template_tokens(self, template: Template) -> int:
        empty = template.fill({"question": "", "memory": "", "chunk": ""})
        return len(self.tokenizer.render(empty.messages)) + JOINT_TOKENS

    def chunks(self, source: str | TextSource) -> Iterator[Chunk]:
        """The document as the agent reads it."""
        return read_chunks(
            source, self.tokenizer, self.budgets.chunk, tags=self.prompts.tags, max_chunks=self.max_chunks
        )

    async def read_chunk(self, reading: Reading, chunk: Chunk, client: Client) -> tuple[Reading, Turn]:
        """Read one chunk: the model's reply becomes the memory."""
        prompt = self.prompts.memory.fill({**self._slots(reading), "chunk": chunk.ids})
        params = turn_params(self.sampling, self.budgets.memory, reading.question, reading.chunks_read)
        turn = await take_turn(client, prompt, params, "memory")
        return self._updated(reading, turn), turn

    async def answer(self, reading: Reading, client: Client) -> Turn:
        """Answer from the memory."""
        prompt = self.prompts.final.fill(self._slots(reading))
        params = turn_params(self.sampling, self.budgets.answer, reading.question, FINAL_STEP)
        return await take_turn(client, prompt, params, "final")

    async def run(self, task: Task, client: Client) -> Trajectory:
        """Read the task's context and answer; a failure keeps what was done until then."""
        turns: list[Turn] = []
        counters: dict[str, float] = {"document_tokens": 0, "truncated_tokens": 0}
        answer, error = "", None
        started = read = time.perf_counter()
        try:
            reading = self.start(task.question)
            self.check_window(task.question, client.window, client.model)
            for chunk in self.chunks(task.context):
                reading, turn = await self.read_chunk(reading, chunk, client)
                turns.append(turn)
                counters["document_tokens"] += len(chunk.ids)
                counters["truncated_tokens"] = chunk.start_token + len(chunk.ids) - counters["document_tokens"]
                counters["empty_updates"] = reading.empty_updates
                counters["truncated_memories"] = reading.truncated_memories
                read = time.perf_counter()
            turns.append(await self.answer(reading, client))
            answer = turns[-1].completion.text
        except (ValueError, ClientError) as failure:  # one task that cannot be worked must not end the others
            error = str(failure)
        return Trajectory(
            task_id=task.id,
            group_id=task.group or task.id,
            conversations=conversations_of(turns),
            answer=answer,
            error=error,
            timings={"reading": read - started, "answering": time.perf_counter() - read},
            counters=counters | generation_counters(turns),
        )

    def _slots(self, reading: Reading) -> dict[str, Part]:
        memory: Part = reading.memory_ids or reading.memory_text or self.prompts.no_memory
        return {"question": neutralise(reading.question, self.prompts.tags), "memory": memory}

    def _updated(self, reading: Reading, turn: Turn) -> Reading:
        completion = turn.completion
        reading = replace(reading, chunks_read=reading.chunks_read + 1)
        if not completion.text.strip():
            return replace(reading, empty_updates=reading.empty_updates + 1)
        ids = [int(token) for token in completion.token_ids]
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return replace(
            reading,
            memory_ids=tuple(ids),
            memory_text=completion.text,
            truncated_memories=reading.truncated_memories + (completion.finish_reason == "length"),
        )
