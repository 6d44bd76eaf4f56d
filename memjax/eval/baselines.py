"""What a memory agent is compared with: the whole text in the window, no text at all, and only the right paragraphs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from memjax.agents.base import Agent, AgentTokenizer, Turn, conversations_of, generation_counters
from memjax.agents.memagent import MemAgent
from memjax.agents.prompt_files import SinglePrompt, Template, load_memory_prompts, load_single_prompt
from memjax.agents.single import SingleAgent
from memjax.data.chunks import MIN_CHUNK_TOKENS, read_chunks
from memjax.data.corpus import Documents
from memjax.eval.config import AgentName, EvalConfig
from memjax.eval.diagnosis import passages
from memjax.eval.scoring import PRESETS
from memjax.rollout.client import Client, ClientError
from memjax.trajectory import SamplingParams, Task, Trajectory


@dataclass(frozen=True)
class PromptedAgent:
    """An agent, and the hash of the prompts that it uses."""

    agent: Agent
    prompt_hash: str


def make_agent(config: EvalConfig, tokenizer: AgentTokenizer) -> PromptedAgent:
    """The agent that `config.agent` names."""
    preset = PRESETS[config.preset]
    sampling = SamplingParams(temperature=preset.temperature, top_p=preset.top_p, seed=config.seed)
    if config.agent == "memagent":
        prompts = load_memory_prompts(config.layout, config.prompts)
        return PromptedAgent(MemAgent(tokenizer, prompts, config.budgets, sampling), prompts.digest)
    if config.agent == "no-context":
        prompt = load_no_context_prompt()
        return PromptedAgent(SingleAgent(tokenizer, prompt, config.budgets, sampling), prompt.digest)
    single = SingleAgent(tokenizer, load_single_prompt(), config.budgets, sampling)
    return PromptedAgent(MiddleCut(single) if config.agent == "single-truncated" else single, single.prompt.digest)


def load_no_context_prompt() -> SinglePrompt:
    """The prompt that shows the question alone."""
    text = (
        (resources.files("memjax.eval") / "prompts" / "no_context.txt").read_text(encoding="utf-8").removesuffix("\n")
    )
    return SinglePrompt(Template.parse(text, "no_context.txt", frozenset({"question"})))


@dataclass(frozen=True)
class MiddleCut:
    """`single` on a text whose middle is left out when it is longer than the window, as upstream's baselines do."""

    single: SingleAgent

    async def run(self, task: Task, client: Client) -> Trajectory:
        """Answer from the two ends of the text; the tokens left out are counted as `truncated_tokens`."""
        turns: list[Turn] = []
        counters: dict[str, float] = {}
        error = None
        started = time.perf_counter()
        try:
            room = self._room(task.question, client)
            tags = self.single.prompt.tags
            chunk = next(read_chunks(task.context, self.single.tokenizer, room, tags=tags, max_chunks=1), None)
            ids = chunk.ids if chunk else ()
            whole = chunk.document_tokens if chunk else 0
            counters = {"document_tokens": len(ids), "truncated_tokens": whole - len(ids)}
            turns.append(await self.single.answer(ids, task.question, client))
        except (ValueError, ClientError) as failure:  # one task that cannot be worked must not end the others
            error = str(failure)
        return Trajectory(
            task_id=task.id,
            group_id=task.group or task.id,
            conversations=conversations_of(turns),
            answer=turns[-1].completion.text if turns else "",
            error=error,
            timings={"answering": time.perf_counter() - started},
            counters=counters | generation_counters(turns),
        )

    def _room(self, question: str, client: Client) -> int:
        """The tokens that are left for text."""
        if client.window is None:
            raise ValueError(f"the window of {client.model} is not known, so no text can be cut to it: give --window")
        room = client.window - self.single.window_needed(0, question)
        if room < MIN_CHUNK_TOKENS:
            raise ValueError(
                f"the window of {client.model} ({client.window} tokens) leaves {room} for a text: raise --window"
            )
        return room


def shown_task(task: Task, agent: AgentName) -> Task:
    """The task as the agent is to see it: whole, without its text, or with only the question's own paragraphs."""
    if agent == "no-context":
        return replace(task, context="", extra=_without_places(task))
    if agent == "oracle":
        return replace(task, context=own_text(task), extra=_without_places(task))
    return task


def own_text(task: Task) -> str:
    """The paragraphs that came with the question, else the passages that hold the answer; ValueError for neither."""
    own, context = task.extra.get("own"), task.context
    if own and isinstance(context, Documents):
        return "".join(Documents(context.corpus, tuple(context.numbers[i - 1] for i in own)).pieces())
    if found := passages(task):
        return "\n\n".join(text.strip() for _, text in found)
    raise ValueError(f"task {task.id!r} does not say which passages hold its answer, so there is no oracle for it")


def _without_places(task: Task) -> dict[str, Any]:
    """What the data set knows, less where things stood in the whole text."""
    return {name: value for name, value in task.extra.items() if name not in ("evidence", "own")}
