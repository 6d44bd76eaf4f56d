"""A world of small sums in which a model of 90,000 parameters can learn to call a calculator and to read its result.

A question is `12 plus 7 minus 3`: the calculator takes it as `12 + 7 - 3`. Its numbers and values are 0 to 99, a word
each. The tokenizer is of whole words, JSON's among them; the chat template names the tools and has a role for their
results.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memjax.data import tiny
from memjax.data.seeds import stream
from memjax.trajectory import Task

OPERATIONS: Mapping[str, str] = MappingProxyType({"plus": "+", "minus": "-", "times": "*"})
"""What a question says for what the calculator takes."""

MOST = 99
"""The largest number and value."""

NUMBERS = tuple(map(str, range(MOST + 1)))
CALL_MARKS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for tool in tools %}tool {{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }}"
    "{% for call in message.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
_CALL_WORDS = ('{"name":', '"calculator",', '"arguments":', '{"expression":', '"', '"}}')
_OTHER = ("<unk>", "system", "user", "assistant", "tool", "calculator", "\\boxed{", "}", *_CALL_WORDS)
_WORDS = (*_OTHER, *OPERATIONS, *OPERATIONS.values(), *NUMBERS)


class ArithmeticTasks(BaseModel):
    """An endless sequence of tasks: `task(i)` is the same one wherever and whenever it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_numbers: int = Field(default=2, ge=2)
    """Fewest numbers of a question."""
    max_numbers: int = Field(default=3, ge=2)
    """Most numbers of a question; each count in between is equally likely."""
    seed: int = 0
    """Names the sequence."""

    @model_validator(mode="after")
    def _counts_agree(self) -> ArithmeticTasks:
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers ({self.min_numbers}) must not exceed max_numbers ({self.max_numbers})")
        return self

    def task(self, index: int) -> Task:
        """Task number `index`; its value, and that of each of its beginnings, is 0 to 99."""
        rng = stream(self.seed, "arithmetic", index)
        words = [rng.choice(NUMBERS)]
        for _ in range(rng.randint(self.min_numbers, self.max_numbers) - 1):
            words = next(longer for longer in _continuations(words, rng) if 0 <= value_of(longer) <= MOST)
        return Task(
            id=f"arithmetic-{self.seed}-{index}",
            question=" ".join(words),
            context="",
            answers=(str(value_of(words)),),
            metric="em",
        )


def _continuations(words: Sequence[str], rng: random.Random) -> Any:
    while True:
        yield [*words, rng.choice([*OPERATIONS]), rng.choice(NUMBERS)]


def value_of(words: Sequence[str]) -> int:
    """The value of the words of a question: times before plus and minus."""
    total, product = 0, int(words[0])
    for operation, number in zip(words[1::2], words[2::2], strict=True):
        if operation == "times":
            product *= int(number)
        else:
            total, product = total + product, int(number) * (1 if operation == "plus" else -1)
    return total + product


POLICIES = ("whole", "hasty", "swapped", "guess")
"""Call with the whole question, without its last number, with another operation; or guess without a call."""


def replies(task: Task, policy: str, rng: random.Random) -> list[str]:
    """What someone with this policy writes about a task: a call and then its value in a box, or a box at once."""
    words = task.question.split()
    if policy == "guess":
        return [_boxed(rng.choice(NUMBERS))]
    if policy == "hasty":
        words = words[:-2]
    elif policy == "swapped":
        at = rng.randrange(1, len(words), 2)
        words[at] = rng.choice([operation for operation in OPERATIONS if operation != words[at]])
    expression = " ".join(OPERATIONS.get(word, word) for word in words)
    call = f'{CALL_MARKS[0]} {{"name": "calculator", "arguments": {{"expression": " {expression} "}}}} {CALL_MARKS[1]}'
    return [call, _boxed(str(value_of(words)))]


def _boxed(answer: str) -> str:
    return f"\\boxed{{ {answer} }}"


def model_config() -> dict[str, Any]:
    """The config.json of the model that learns this: the tiny one with a few more words."""
    return {**tiny.model_config(), "vocab_size": 136}


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of whole words with a chat template that knows tools, and the model's config beside it."""
    tiny.write_word_tokenizer(directory, _WORDS, model_config(), CALL_MARKS, CHAT_TEMPLATE)
