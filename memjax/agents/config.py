"""What the built-in agents have in common: a frozen config that is called with a task and its episode."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from memjax.agents.prompt_files import Template
from memjax.data.chunks import MIN_CHUNK_TOKENS, escape_tags
from memjax.episodes.episode import Episode, EpisodeTokenizer
from memjax.trajectory import Task

_JOINT_TOKENS = 8  # allowed for text that takes more tokens beside the prompt's words than alone
_LEAST_SHARE = 32  # tokens; a smaller memory or answer is not worth having


class NamedAgent(BaseModel):
    """An agent: its fields are the keys under `agent` in every config.

    One that is a `MeasuredAgent` too is checked against a model's window before anything is read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    needs_document: ClassVar[bool] = False
    """Whether it makes no sense to ask it without a document."""

    name: str
    """Which agent: one that is built in, or FILE.py:NAME of your own."""

    @abstractmethod
    async def __call__(self, task: Task, episode: Episode) -> str:
        """Work the task; the reply with the answer."""

    def fitted(self, chosen: Collection[str], question: str, tokenizer: EpisodeTokenizer, window: int | None) -> Self:
        """The agent for a window of so many tokens: itself, where nobody knows which of its keys are budgets."""
        return self

    @property
    def prompt_hash(self) -> str | None:
        """A hash of every word of the prompts; None where they are nowhere but in the code."""
        return None


class AgentConfig(NamedAgent):
    """An agent with budgets, which are in tokens."""

    needs_document: ClassVar[bool] = True

    question: int = Field(default=1024, ge=1)
    """Longest question."""
    answer: int = Field(default=1024, ge=1)
    """Longest answer."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, and nothing that was computed from the former ones."""
        copy = super().model_copy(update=update, deep=deep)
        for name in set(copy.__dict__) - set(type(self).model_fields):
            del copy.__dict__[name]
        return copy

    @abstractmethod
    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int) -> dict[str, int]:
        """The most tokens by part of one turn, prompt and reply together, for a document of so many tokens."""

    def asked(self, task: Task, tokenizer: EpisodeTokenizer, tags: Collection[str]) -> str:
        """The question as a prompt takes it; ValueError where it is empty or over its budget."""
        self.question_tokens(task.question, tokenizer)
        return escape_tags(task.question, tuple(tags))

    def question_tokens(self, question: str, tokenizer: EpisodeTokenizer) -> int:
        """The tokens of a question; ValueError where it is empty or over its budget."""
        if not question.strip():
            raise ValueError("the question is empty: ask something")
        tokens = tokenizer.count(question)
        if tokens > self.question:
            raise ValueError(
                f"the question has {tokens} tokens and its budget is {self.question}: shorten it, or raise the "
                "question budget (--question-tokens)"
            )
        return tokens

    def fitted(self, chosen: Collection[str], question: str, tokenizer: EpisodeTokenizer, window: int | None) -> Self:
        """The agent with those budgets lowered that nobody chose, as far as a small window asks for it.

        Question, memory and answer get at most an eighth of the window each, the chunk what is left; a longer
        `question` gets twice as much, or more. Another question that fits the same budget changes nothing.
        """
        if window is None:
            return self
        budgets = {
            name: getattr(self, name) for name in ("question", "memory", "answer", "chunk") if hasattr(self, name)
        }
        eighth = max(_LEAST_SHARE, window // 8)
        lowered = {name: min(tokens, eighth) for name, tokens in budgets.items() if name != "chunk"}
        while lowered["question"] < min(tokenizer.count(question), budgets["question"]):
            lowered["question"] = min(2 * lowered["question"], budgets["question"])
        agent = self.model_copy(update={name: n for name, n in lowered.items() if name not in chosen})
        longest = agent.longest_turn("?", tokenizer, 0) | {"question": agent.question}
        over = sum(longest.values()) - window
        if over > 0 and "chunk" in budgets and "chunk" not in chosen:
            agent = agent.model_copy(update={"chunk": max(MIN_CHUNK_TOKENS, budgets["chunk"] - over)})
        return agent


def template_tokens(template: Template, tokenizer: EpisodeTokenizer) -> int:
    """The tokens of a prompt without what fills its slots."""
    empty = template.fill(dict.fromkeys(template.slots, ""))
    return len(tokenizer.render(empty.messages)) + _JOINT_TOKENS
