"""The agent with tools: one conversation that grows by calls of the model and by what its environment says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import Field

from memjax.agents.config import AgentConfig
from memjax.agents.prompt_files import bundled_text
from memjax.environments.calculator import Calculator
from memjax.environments.environment import ToolEnvironment
from memjax.episodes.episode import Episode, EpisodeTokenizer, Reply
from memjax.rollout.client import Message, Part, Prompt, ToolCall
from memjax.rollout.tool_calls import parse_tool_calls, problem_with
from memjax.trajectory import Task

ENVIRONMENTS: Mapping[str, Callable[[], ToolEnvironment]] = MappingProxyType({"calculator": Calculator})
"""What makes an environment, by name."""

_TEXT_TOKENS = 4096  # in which a context is taken in


class ToolAgent(AgentConfig):
    """Calls tools until it answers without a call."""

    needs_document: ClassVar[bool] = False

    name: Literal["tool"] = "tool"
    environment: Literal["calculator"] = "calculator"
    """Where the tools are."""
    max_steps: int = Field(default=8, ge=1)
    """Replies after which the last one is the answer."""
    conversation: int = Field(default=4096, ge=1)
    """What replies and results may take together, with the template's words around them."""
    system: str | None = None
    """Instructions instead of the bundled ones; "" for none."""

    async def __call__(self, task: Task, episode: Episode) -> str:
        """Solve the task; a context is shown whole before the question."""
        environment = ENVIRONMENTS[self.environment]()
        step = await episode.reset(environment)
        self.question_tokens(task.question, episode.tokenizer)
        context: list[int] = []
        async for chunk in episode.chunks(task.context, _TEXT_TOKENS):
            context += chunk.ids
        messages = self._begun(tuple(context), step.text)
        end = None
        for _ in range(self.max_steps):
            prompt = Prompt(tuple(messages), tools=environment.tools)
            taken = len(episode.tokenizer.render(messages, tools=environment.tools))
            end = end or taken + self.conversation
            if taken >= end:
                raise ValueError(f"replies and results took the {self.conversation} tokens of the conversation")
            most = episode.room(prompt, min(self.answer, end - taken))
            reply = await episode.chat(prompt, max_tokens=most, kind="tool")
            results = await self._results(reply, environment, episode)
            if not results:
                break
            messages += [reply.message, *results]
        return reply.text

    async def _results(self, reply: Reply, environment: ToolEnvironment, episode: Episode) -> list[Message]:
        """What comes back for the calls of a reply, and a sentence for each that is wrong."""
        parsed = parse_tool_calls(reply.text, "call_" + "_".join(map(str, reply.key)))
        found = []
        for call in parsed.calls:
            problem = problem_with(call, environment.tools)
            text = problem or (await episode.step(environment, _action(call))).text
            found.append(Message("tool", (text,), tool_call_id=call.id, name=call.name))
        episode.count("tool_calls", len(parsed.calls))
        return found + [Message("tool", (problem,)) for problem in parsed.problems]

    def _begun(self, context: Part, question: str) -> list[Message]:
        system = bundled_text("tool", "system") if self.system is None else self.system
        parts: tuple[Part, ...] = (context, "\n\n", question) if len(context) else (question,)
        user = Message("user", parts)
        return [Message("system", (system,)), user] if system else [user]

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0) -> dict[str, int]:
        """The parts of the last turn."""
        asked = self.question_tokens(question, tokenizer)
        tools = ENVIRONMENTS[self.environment]().tools
        template = len(tokenizer.render(self._begun((), ""), tools=tools))
        return {"text": document_tokens, "question": asked, "conversation": self.conversation, "prompt": template}

    def fitted(self, chosen: Collection[str], question: str, tokenizer: EpisodeTokenizer, window: int | None) -> Self:
        """The agent with budgets lowered as far as a small window asks for it, the conversation's to what is left."""
        agent = super().fitted(chosen, question, tokenizer, window)
        if window is None or "conversation" in chosen:
            return agent
        others = agent.longest_turn("?", tokenizer, 0) | {"question": agent.question, "conversation": 0}
        return agent.model_copy(update={"conversation": max(1, min(agent.conversation, window - sum(others.values())))})

    @property
    def prompt_hash(self) -> str:
        """A hash of the instructions."""
        return hashlib.sha256(repr([message.content for message in self._begun((), "")]).encode()).hexdigest()[:16]


def _action(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": json.loads(call.json)}, ensure_ascii=False)
