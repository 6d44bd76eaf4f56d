"""RULER's counting tasks: the most common words of a list, and the most frequent words of a coded text."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memjax.data.ruler.keys import vocabulary
from memjax.data.seeds import derive_seed, stream

COMMON_WORDS = 10
CODE_LETTERS = 6
_SHORT = 4096  # below this length upstream repeats the words of the list less often


@dataclass(frozen=True)
class CommonWordsDraft:
    """A numbered, shuffled list: ten words come `often` times, all others `seldom`. Units are the other words."""

    seed: int
    often: int
    seldom: int

    @property
    def question(self) -> str:
        """Ask for the common words."""
        return f"Which {COMMON_WORDS} words occur most often in the numbered list?"

    @property
    def answers(self) -> tuple[str, ...]:
        """The common words."""
        return tuple(self._shuffled_vocabulary()[:COMMON_WORDS])

    @property
    def evidence(self) -> tuple[str, ...]:
        """None: the whole list is."""
        return ()

    def pieces(self, units: int) -> Iterator[str]:
        """Yield the list, item by item."""
        words = list(self.answers) + self._uncommon(units)
        repeats = np.repeat([self.often, self.seldom], [COMMON_WORDS, units])
        items = np.repeat(np.arange(len(words), dtype=np.int32), repeats)
        _shuffle(items, self.seed)
        for i, item in enumerate(items, start=1):
            yield f"{' ' if i > 1 else ''}{i}. {words[item]}"

    def _shuffled_vocabulary(self) -> list[str]:
        words = list(vocabulary("noun", "adjective", "verb"))
        stream(self.seed, "vocabulary").shuffle(words)
        return words

    def _uncommon(self, count: int) -> list[str]:
        """Words that are not common; adjective-noun pairs once the vocabulary is used up."""
        shuffled = self._shuffled_vocabulary()
        common, words = set(shuffled[:COMMON_WORDS]), shuffled[COMMON_WORDS:][:count]
        adjectives = [word for word in vocabulary("adjective") if word not in common]
        nouns = [word for word in vocabulary("noun") if word not in common]
        space = len(adjectives) * len(nouns)
        if count - len(words) > space:
            raise ValueError(f"a list of {count} different words is longer than the vocabulary: ask for a shorter one")
        step = next(n for n in range(round(space * 0.618), space) if math.gcd(n, space) == 1)
        start = stream(self.seed, "pairs").randrange(space)
        for k in range(count - len(words)):  # a step that shares no factor with the space visits no pair twice
            adjective, noun = divmod((start + k * step) % space, len(nouns))
            words.append(f"{adjectives[adjective]}-{nouns[noun]}")
        return words


@dataclass(frozen=True)
class FrequentWordsDraft:
    """Coded words whose counts follow a zeta distribution with exponent 2; the most frequent is dots. Units: words."""

    seed: int
    vocabulary_size: int

    @property
    def question(self) -> str:
        """Ask for the three most frequent codes."""
        return "Leaving the dots aside, which three coded words occur most often in the text? Name only the words."

    @property
    def answers(self) -> tuple[str, ...]:
        """The second to fourth rank: the first is the dots."""
        return tuple(self._ranked()[1:4])

    @property
    def evidence(self) -> tuple[str, ...]:
        """None: the whole text is."""
        return ()

    def pieces(self, units: int) -> Iterator[str]:
        """Yield the coded text, word by word."""
        ranked = self._ranked()
        zeta_2 = math.pi**2 / 6
        counts = (units / zeta_2 / np.arange(1, len(ranked) + 1) ** 2.0).astype(np.int64)
        words = np.repeat(np.arange(len(ranked), dtype=np.int32), counts)
        _shuffle(words, self.seed)
        for i, rank in enumerate(words):
            yield f"{' ' if i else ''}{ranked[rank]}"

    def _ranked(self) -> list[str]:
        rng = stream(self.seed, "codes")
        codes: dict[str, None] = {"...": None}
        while len(codes) < self.vocabulary_size:
            codes["".join(rng.choices(string.ascii_lowercase, k=CODE_LETTERS))] = None
        return list(codes)


def draft_common_words(seed: int, length: int) -> CommonWordsDraft:
    """The list of one sample of `length` tokens."""
    return CommonWordsDraft(seed, *((30, 3) if length >= _SHORT else (6, 1)))


def draft_frequent_words(seed: int, length: int) -> FrequentWordsDraft:
    """The coded text of one sample: one code in its vocabulary per 50 tokens of `length`."""
    return FrequentWordsDraft(seed, max(COMMON_WORDS, length // 50))


def _shuffle(items: np.ndarray, seed: int) -> None:
    # numpy promises the stream of RandomState for ever, that of a Generator only within a release.
    np.random.RandomState(derive_seed(seed, "order")).shuffle(items)
