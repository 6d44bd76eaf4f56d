"""RULER's needle-in-a-haystack tasks: facts of the form key -> value hidden among filler."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from memjax.data.haystack import Haystack, ends_sentence
from memjax.data.ruler.draft import NOISE_LINE
from memjax.data.ruler.keys import Kind, draw, draw_distinct
from memjax.data.seeds import stream

DEPTHS = 40
"""Needles in running text go to this many evenly spaced depths, as upstream."""

_NEXT_SENTENCE = 256  # words to look ahead for the end of a sentence; a text without any gets the needle there
_NOUNS: dict[Kind, tuple[str, str]] = {
    "words": ("word", "words"),
    "numbers": ("number", "numbers"),
    "uuids": ("UUID", "UUIDs"),
}


@dataclass(frozen=True)
class NiahSpec:
    """RULER's parameters of a needle task: what fills the context, what keys and values are, and how many of each."""

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1  # per key
    queries: int = 1


@dataclass(frozen=True)
class NiahDraft:
    """Keys, values and places of one sample. Units are words of running text, or lines of noise or needles."""

    spec: NiahSpec
    seed: int
    essay: Haystack
    facts: tuple[tuple[str, str], ...]  # (key, value), in the order drawn: the queried keys come first

    @property
    def queried(self) -> tuple[str, ...]:
        """The keys that the question asks for."""
        return tuple(dict.fromkeys(key for key, _ in self.facts))[: self.spec.queries]

    @property
    def question(self) -> str:
        """What is asked about the queried keys, in singular or plural."""
        singular, plural = _NOUNS[self.spec.value]
        keys = self.queried
        if self.spec.queries * self.spec.values == 1:
            return f"Which secret {singular} does the text give for {keys[0]}?"
        listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        return f"Which secret {plural} does the text give for {listed}? Name all of them."

    @property
    def answers(self) -> tuple[str, ...]:
        """The values of the queried keys."""
        return tuple(value for key, value in self.facts if key in self.queried)

    @property
    def evidence(self) -> tuple[str, ...]:
        """The needles of the queried keys, as they stand in the context."""
        return tuple(self._needle(key, value) for key, value in self.facts if key in self.queried)

    def pieces(self, units: int) -> Iterator[str]:
        """Yield the filler with the needles in their places."""
        rng = stream(self.seed, "places")
        needles = [self._needle(key, value) for key, value in self.facts]
        rng.shuffle(needles)
        if self.spec.haystack == "essay":
            depths = sorted(rng.sample(range(DEPTHS), len(needles)))
            places = [round(units * depth / (DEPTHS - 1)) for depth in depths]
            return _between_sentences(self.essay.words(units), places, needles)
        places = sorted(rng.randint(0, units) for _ in needles)
        return _between_lines(self._lines(units), places, needles)

    def _lines(self, units: int) -> Iterator[str]:
        if self.spec.haystack == "noise":
            return (NOISE_LINE for _ in range(units))
        rng = stream(self.seed, "distractors")
        taken_keys = frozenset(key for key, _ in self.facts)
        taken_values = frozenset(value for _, value in self.facts)
        return (
            self._needle(_other(self.spec.key, rng, taken_keys), _other(self.spec.value, rng, taken_values))
            for _ in range(units)
        )

    def _needle(self, key: str, value: str) -> str:
        sentence = f"A secret {_NOUNS[self.spec.value][0]} for {key} is {value}."
        return f" {sentence}" if self.spec.haystack == "essay" else f"{sentence}\n"


def draft_niah(spec: NiahSpec, seed: int, essay: Haystack) -> NiahDraft:
    """Draw the keys and values of one sample; every key and every value occurs once."""
    rng = stream(seed, "facts")
    keys = draw_distinct(spec.key, max(spec.keys, spec.queries), rng)
    values = draw_distinct(spec.value, len(keys) * spec.values, rng, frozenset(keys))
    facts = tuple((keys[i // spec.values], value) for i, value in enumerate(values))
    return NiahDraft(spec, seed, essay, facts)


def _other(kind: Kind, rng: random.Random, avoid: frozenset[str]) -> str:
    while (value := draw(kind, rng)) in avoid:
        pass
    return value


def _between_lines(lines: Iterable[str], places: list[int], needles: list[str]) -> Iterator[str]:
    """Each needle before the line with the number of its place, or after the last."""
    waiting = list(zip(places, needles, strict=True))[::-1]
    for i, line in enumerate(lines):
        while waiting and waiting[-1][0] <= i:
            yield waiting.pop()[1]
        yield line
    yield from (needle for _, needle in reversed(waiting))


def _between_sentences(words: Iterable[str], places: list[int], needles: list[str]) -> Iterator[str]:
    """Each needle after the first sentence that ends at or behind its place; place 0 is the very start."""
    waiting = list(zip(places, needles, strict=True))[::-1]
    while waiting and waiting[-1][0] == 0:
        yield waiting.pop()[1]
    for count, word in enumerate(words, start=1):
        yield word
        while waiting and waiting[-1][0] <= count and (ends_sentence(word) or count >= waiting[-1][0] + _NEXT_SENTENCE):
            yield waiting.pop()[1]
    yield from (needle for _, needle in reversed(waiting))
