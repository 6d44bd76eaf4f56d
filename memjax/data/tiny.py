"""A long-document task that a model of 90,000 parameters can learn on one CPU core, and the words that it is made of.

A fact is three words, `k07 v21 .`: key 7 has value 21. Facts stand among filler, at most two in every 24 words, and a
question asks for the value of one key. In a chain (`hops: 2`) that key's fact names another key, whose value is wanted.
A document holds many times the facts that a memory has room for, so a reader must know what to leave out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memjax.data.seeds import stream
from memjax.tokenizer_files import added_token, write_json
from memjax.trajectory import Task

CHUNK_WORDS = 24
"""Words between which no fact is split; the chunk budget of an agent that reads this task."""

WINDOW = 64
"""Tokens of the longest conversation about this task, prompt and reply together."""

BUDGETS: Mapping[str, int] = MappingProxyType({"question": 4, "chunk": CHUNK_WORDS, "memory": 10, "answer": 6})
"""The budgets of an agent that reads this task, in tokens: a word is one."""

ASSETS = Path(__file__).parents[1] / "assets" / "tiny"
"""The bundled model that learned this task, and its prompts."""

CAPACITY = 3
"""Facts in a memory of 10 tokens, one of which ends it."""

NOTHING = "none"
"""The memory that holds no fact, and the answer of a reader who does not know."""

END = "<|endoftext|>"
FILLER = tuple(f"w{i:02}" for i in range(32))
KEYS = tuple(f"k{i:02}" for i in range(32))
VALUES = tuple(f"v{i:02}" for i in range(32))
_OTHER = ("<unk>", ".", NOTHING, "value", "chain", "ask", "memory", "text", "update", "answer", "\\boxed{", "}")

_SLOT_WORDS = CHUNK_WORDS // 2
_FACT_WORDS = 3

Fact = tuple[str, str]
"""A key, and the value or key that it leads to."""


class TinyTasks(BaseModel):
    """An endless sequence of tasks: `task(i)` is the same one wherever and whenever it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_chunks: int = Field(default=1, ge=1)
    """Fewest chunks of a document."""
    max_chunks: int = Field(default=4, ge=1)
    """Most chunks of a document; each number in between is equally likely."""
    hops: int = Field(default=1, ge=1, le=2)
    """Facts that lead from the question to the answer; the second may stand before the first."""
    distractors: float = Field(default=0.7, ge=0, le=1)
    """Chance that a half chunk without a needed fact holds another one."""
    seed: int = 0
    """Names the sequence."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> TinyTasks:
        if self.min_chunks > self.max_chunks:
            raise ValueError(f"min_chunks ({self.min_chunks}) must not exceed max_chunks ({self.max_chunks})")
        return self

    def task(self, index: int) -> Task:
        """Task number `index`. `extra` holds the number of chunks and the keys of the chain."""
        rng = stream(self.seed, "tiny", index)
        chunks = rng.randint(self.min_chunks, self.max_chunks)
        chain = rng.sample(KEYS, self.hops)
        value = rng.choice(VALUES)
        needed = list(zip(chain, [*chain[1:], value], strict=True))
        slots: list[Fact | None] = [self._distractor(chain, rng) for _ in range(2 * chunks)]
        for place, fact in zip(rng.sample(range(len(slots)), self.hops), needed, strict=True):
            slots[place] = fact
        words = [word for fact in slots for word in _slot(fact, rng)]
        return Task(
            id=f"tiny-{self.seed}-{index}",
            question=f"{'value' if self.hops == 1 else 'chain'} {chain[0]}",
            context=" ".join(words),
            answers=(value,),
            metric="em",
            extra={"chunks": chunks, "chain": chain},
        )

    def _distractor(self, chain: Sequence[str], rng: random.Random) -> Fact | None:
        if rng.random() >= self.distractors:
            return None
        others = [key for key in KEYS if key not in chain]
        key = rng.choice(others)
        is_link = self.hops > 1 and rng.random() < 0.5
        return key, rng.choice([other for other in others if other != key] if is_link else VALUES)


def facts_in(text: str) -> list[Fact]:
    """The facts of a text, in order."""
    words = text.split()
    return [
        (word, words[i + 1])
        for i, word in enumerate(words[:-2])
        if word in _KEY_SET and words[i + 1] in _TARGET_SET and words[i + 2] == "."
    ]


def write_facts(facts: Sequence[Fact]) -> str:
    """A memory that holds the facts, each once, as far as they fit."""
    kept = list(dict.fromkeys(facts))[:CAPACITY]
    return " ".join(f"{key} {target} ." for key, target in kept) or NOTHING


Policy = Callable[[Sequence[Fact], Sequence[Fact], Sequence[str], random.Random], Sequence[Fact]]
"""(facts in memory, facts of the chunk, keys of the chain, randomness) -> the facts to keep."""

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        # What the question needs, with hindsight: in a chain also a second hop that comes before the first.
        "oracle": lambda known, read, chain, rng: [fact for fact in [*known, *read] if fact[0] in chain],
        # The others do not look at the question.
        "first": lambda known, read, chain, rng: [*known, *read],
        "newest": lambda known, read, chain, rng: [*known, *read][-CAPACITY:],
        "random": lambda known, read, chain, rng: _some([*known, *read], rng),
    }
)


def replies(task: Task, policy: str, rng: random.Random) -> list[str]:
    """What a reader with this policy writes about a task: a memory after each chunk, then the answer in a box."""
    assert isinstance(task.context, str)
    words = task.context.split()
    known: list[Fact] = []
    written = []
    for start in range(0, len(words), CHUNK_WORDS):
        read = facts_in(" ".join(words[start : start + CHUNK_WORDS]))
        memory = write_facts(POLICIES[policy](known, read, task.extra["chain"], rng))
        written.append(memory)
        known = facts_in(memory)
    return [*written, f"\\boxed{{ {_follow(task.extra['chain'], dict(known))} }}"]


def recall_example(rng: random.Random, most: int = 6) -> tuple[str, str, str, str]:
    """A question, a memory, a chunk with up to `most` facts, and the reply that lists all of their facts anew.

    Listing every fact shown trains the step from a key to its value many times per token, which answers alone train
    once per document: a model that learns from these first forms that circuit, and one that does not stays without.
    """
    keys = rng.sample(KEYS, CAPACITY + most)
    facts = [(key, rng.choice(VALUES)) for key in keys]
    known, read = facts[: rng.randint(0, CAPACITY)], facts[CAPACITY : CAPACITY + rng.randint(1, most)]
    gaps = [0] * (len(read) + 1)
    for _ in range(CHUNK_WORDS - _FACT_WORDS * len(read)):
        gaps[rng.randrange(len(gaps))] += 1
    words = rng.choices(FILLER, k=gaps[0])
    for (key, value), gap in zip(read, gaps[1:], strict=True):
        words += [key, value, ".", *rng.choices(FILLER, k=gap)]
    shown = [*known, *read]
    rng.shuffle(shown)
    reply = " ".join(f"{key} {value} ." for key, value in shown)
    return f"value {rng.choice(KEYS)}", write_facts(known), " ".join(words), reply


def model_config() -> dict[str, Any]:
    """The config.json of the model that learns this task: 90,000 parameters."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 112,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.125,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of whole words, and the model's config beside it.

    White space only parts words; every word is a token with a blank in front, as byte-level vocabularies have them.
    There is no chat template: a prompt is its parts, one after another. transformers reads it as
    `PreTrainedTokenizerFast`; its `AutoTokenizer` would take every Qwen2 model to have Qwen2's own pre-tokeniser.
    """
    write_word_tokenizer(directory, (*_OTHER, *FILLER, *KEYS, *VALUES), model_config())


def write_word_tokenizer(
    directory: Path,
    words: Sequence[str],
    config: Mapping[str, Any],
    marks: Sequence[str] = (),
    chat_template: str | None = None,
) -> None:
    """As `write_tokenizer`, with these words; `marks` are added tokens that have a text."""
    vocabulary = {word if word == "<unk>" else f"Ġ{word}": i for i, word in enumerate(words, start=1 + len(marks))}
    added = [added_token(0, END, special=True), *(added_token(i + 1, mark, False) for i, mark in enumerate(marks))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "WordLevel",
            "vocab": {token["content"]: token["id"] for token in added} | vocabulary,
            "unk_token": "<unk>",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    } | ({"chat_template": chat_template} if chat_template else {})
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "tokenizer.json", definition)
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "config.json", config)


def _slot(fact: Fact | None, rng: random.Random) -> list[str]:
    words = rng.choices(FILLER, k=_SLOT_WORDS)
    if fact:
        start = rng.randint(0, _SLOT_WORDS - _FACT_WORDS)
        words[start : start + _FACT_WORDS] = [*fact, "."]
    return words


def _some(facts: Sequence[Fact], rng: random.Random) -> list[Fact]:
    """As many facts as fit, in their order."""
    chosen = sorted(rng.sample(range(len(facts)), min(CAPACITY, len(facts))))
    return [facts[i] for i in chosen]


def _follow(chain: Sequence[str], facts: Mapping[str, str]) -> str:
    found = chain[0]
    for _ in chain:
        found = facts.get(found, NOTHING)
    return found if found in VALUES else NOTHING


_KEY_SET = frozenset(KEYS)
_TARGET_SET = frozenset(KEYS + VALUES)
