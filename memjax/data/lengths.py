"""How long a text is in a model's tokens, and how many units of it fit a budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

_BLOCK_CHARS = 1 << 16
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20}


class TokenCounter(Protocol):
    """The part of a tokenizer that measuring needs."""

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        ...

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[int]:
        """The ids of the text that the pieces make when joined."""
        ...


def parse_length(text: str) -> int:
    """A number of tokens written as 8192, 8k (1024 each) or 3.5m (1024 * 1024 each)."""
    match = _LENGTH.fullmatch(text.strip())
    length = round(float(match[1]) * _SCALE[match[2].lower()]) if match else 0
    if length < 1:
        raise ValueError(f"a length is a number of tokens such as 8192, 7k or 3.5m, got {text!r}")
    return length


def blocks(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in fewer, larger pieces, for readers that pay per piece."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BLOCK_CHARS:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def measure(pieces: Iterable[str], tokenizer: TokenCounter) -> int:
    """How many tokens the pieces have when read as one text."""
    return sum(1 for _ in tokenizer.encode_stream(blocks(pieces)))


def fit_units(tokens_of: Callable[[int], int], budget: int, guess: int) -> tuple[int, int]:
    """How many units of a text to take so that its tokens stay within `budget` and within 0.8 % of it.

    `tokens_of(units)` measures the text made of that many units; it should grow steadily. Returns (units, tokens). A
    unit larger than the tolerance leaves at most one unit unused. Raises ValueError when not even one unit fits.
    """
    fits, fits_tokens, over = 0, 0, 0  # most units known to fit (0: none yet), fewest known not to (0: none yet)
    target = budget - budget // 400
    units = max(1, guess)
    while True:
        tokens = tokens_of(units)
        if tokens <= budget:
            fits, fits_tokens = units, tokens
            if tokens >= budget - budget // 125:
                return fits, fits_tokens
        else:
            over = units
        if over == 1:
            raise ValueError(f"the shortest text has {tokens} tokens, but there is room for {budget}: ask for more")
        if over and over - fits <= 1:
            return fits, fits_tokens
        units = _next_guess(units, tokens, target, fits, over)


def _next_guess(units: int, tokens: int, target: int, fits: int, over: int) -> int:
    """Follow the mean tokens per unit; halve the open interval where that would leave it or barely move."""
    proposed = round(units * target / max(1, tokens))
    if not over:
        return max(fits + 1, proposed)
    if fits < proposed < over:
        return proposed
    return (fits + over) // 2 or 1
