"""Running text to hide things in: any text files as an endless stream of words."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

BOOKS = tuple(
    Path(__file__).parent / "books" / f"{book}.txt.gz"
    for book in ("federalist_papers", "sherlock_holmes_adventures", "pride_and_prejudice")
)
"""Books in the public domain that memjax carries: about half a million tokens."""

_BLOCK_CHARS = 1 << 13
# A run without spaces (a URL, a Chinese sentence) is cut into several words that join again without a space.
_WORD = re.compile(r"(\s*)(\S{1,24})")
_SENTENCE_END = re.compile(r"[.!?。！？][\"'”’)\]]*$")
_ABBREVIATION = re.compile(r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|St|No|vs|etc)\.$")


@dataclass(frozen=True)
class Haystack:
    """Text files read in order, white space normalised. `size` is the number of words in one reading."""

    paths: tuple[Path, ...]
    size: int

    @classmethod
    def open(cls, paths: Sequence[Path] = BOOKS) -> Haystack:
        """Read the files once to know their size. Raises ValueError for a file that is unreadable or without text."""
        paths = tuple(paths)
        size = 0
        for path in paths:
            words = sum(1 for _ in _words(path))
            if not words:
                raise ValueError(f"the haystack file {path} has no text: name a file with running text")
            size += words
        if not size:
            raise ValueError("a haystack needs at least one text file")
        return cls(paths, size)

    def words(self, count: int) -> Iterator[str]:
        """The first `count` words, each with the space before it; after the last word the text starts again."""
        while count > 0:
            for path in self.paths:
                for word in _words(path):
                    yield word
                    count -= 1
                    if not count:
                        return

    def readings(self, count: int) -> int:
        """How many times the text is begun to yield `count` words."""
        return -(-count // self.size)


def ends_sentence(word: str) -> bool:
    """Whether a sentence may end with this word."""
    return bool(_SENTENCE_END.search(word)) and not _ABBREVIATION.search(word)


def _words(path: Path) -> Iterator[str]:
    """The words of one file, each with a space before it where the file has white space."""
    rest = "\n"
    try:
        with _open_text(path) as file:
            while block := file.read(_BLOCK_CHARS):
                text = rest + block
                found = list(_WORD.finditer(text))
                yield from map(_spaced, found[:-1])
                rest = text[found[-1].start() :] if found else text  # the last word may go on in the next block
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the haystack file {path} as UTF-8 text: {error}") from error
    yield from map(_spaced, _WORD.finditer(rest))


def _spaced(word: re.Match[str]) -> str:
    return " " + word[2] if word[1] else word[2]


def _open_text(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return cast("IO[str]", opener(path, "rt", encoding="utf-8"))
