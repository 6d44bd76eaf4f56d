"""The baseline: the whole text in one window."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

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
from memjax.agents.prompt_files import SinglePrompt, load_single_prompt
from memjax.data.chunks import neutralise, read_chunks
from memjax.rollout.client import Client, ClientError
from memjax.trajectory import SamplingParams, Task, TextSource, Trajectory


@dataclass(frozen=True)
class SingleAgent:
    """Shows the model the whole text and the question at once; a text past the window is refused.

    Of the budgets only question and answer count; `sampling.max_tokens` gives way to the latter.
    """

    tokenizer: AgentTokenizer
    prompt: SinglePrompt = field(default_factory=load_single_prompt)
    budgets: Budgets = field(default_factory=Budgets)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def window_needed(self, text_tokens: int, question: str) -> int:
        """The tokens of the conversation about a question, prompt and reply together."""
        asked = question_tokens(question, self.budgets.question, self.tokenizer)
        empty = self.prompt.answer.fill({"question": "", "text": ""})
        template = len(self.tokenizer.render(empty.messages)) + JOINT_TOKENS
        return text_tokens + asked + self.budgets.answer + template

    def fitting_text(self, source: str | TextSource, question: str, window: int | None, model: str) -> tuple[int, ...]:
        """The ids of the whole text; ValueError, with the numbers, where it does not fit the window of the model."""
        beside = self.window_needed(0, question)
        room = None if window is None else window - beside
        ids: list[int] = []
        total = 0
        for chunk in read_chunks(source, self.tokenizer, self.budgets.chunk, tags=self.prompt.tags):
            total += len(chunk.ids)
            if room is None or total <= room:
                ids.extend(chunk.ids)
        if room is not None and total > room:
            raise ValueError(
                f"the text has {total} tokens, but beside the question and an answer of {self.budgets.answer} the "
                f"window of {model} ({window}) holds {max(0, room)}: read it with the memagent agent"
            )
        return tuple(ids)

    async def answer(self, ids: tuple[int, ...], question: str, client: Client) -> Turn:
        """Answer from the text."""
        prompt = self.prompt.answer.fill({"question": neutralise(question, self.prompt.tags), "text": ids})
        params = turn_params(self.sampling, self.budgets.answer, question, step=0)
        return await take_turn(client, prompt, params, "final")

    async def run(self, task: Task, client: Client) -> Trajectory:
        """Answer the task; a failure is a trajectory that says so."""
        turns: list[Turn] = []
        answer, error, tokens = "", None, 0
        started = time.perf_counter()
        try:
            ids = self.fitting_text(task.context, task.question, client.window, client.model)
            tokens = len(ids)
            turns.append(await self.answer(ids, task.question, client))
            answer = turns[-1].completion.text
        except (ValueError, ClientError) as failure:  # one task that cannot be worked must not end the others
            error = str(failure)
        return Trajectory(
            task_id=task.id,
            group_id=task.group or task.id,
            conversations=conversations_of(turns),
            answer=answer,
            error=error,
            timings={"answering": time.perf_counter() - started},
            counters={"document_tokens": tokens} | generation_counters(turns),
        )
