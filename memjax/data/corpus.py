"""Documents that many tasks share: read from disk one by one, so that a context is a list of numbers and not a text."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from memjax.data.json_rows import read_rows


class Corpus:
    """Numbered documents in a file; holds where each starts, and no text.

    Safe to read from several threads. The file is closed with `close`, or else when nobody refers to the corpus any
    more: the tasks over a corpus outlive the reading of their file.
    """

    def __init__(self, path: str | Path):
        """Open JSON lines `{"text": ...}`, or HotpotQA's original JSON, whose documents are sorted and without repeats.

        That is MemAgent's numbering. HotpotQA's JSON and compressed files are unpacked into a temporary file first.
        """
        self.path = Path(path)
        plain = self.path.suffix == ".jsonl"
        self._file = os.open(self.path, os.O_RDONLY) if plain else _unpacked(self.path)
        self._close = weakref.finalize(self, os.close, self._file)
        self._starts = array("Q", [0])
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                self._starts.append(self._starts[-1] + len(line))
        if len(self) == 0:
            raise ValueError(f"{self.path} holds no documents")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path} has documents 0 to {len(self) - 1}, not {number}")
        start, end = self._starts[number], self._starts[number + 1]
        line = os.pread(self._file, end - start, start)
        try:
            return _text_of(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'{self.path}, line {number + 1}: expected {{"text": "..."}}, got {line[:40]!r}'
            ) from error

    def close(self) -> None:
        """Close the file; the documents cannot be read afterwards."""
        self._close()


@dataclass(frozen=True)
class Documents:
    """A TextSource: documents of a corpus, in the order given."""

    corpus: Corpus
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = [number for number in self.numbers if not 0 <= number < len(self.corpus)]
        if wrong:
            raise ValueError(f"{self.corpus.path} has documents 0 to {len(self.corpus) - 1}, not {wrong[0]}")

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{len(self.numbers)} documents of {self.corpus.path.name}"

    def pieces(self) -> Iterator[str]:
        """Yield the documents as numbered sections."""
        return numbered(self.corpus[number] for number in self.numbers)


def numbered(documents: Iterable[str]) -> Iterator[str]:
    """The text in which documents stand one after another, in pieces: the form of MemAgent's and RULER's QA tasks."""
    for number, document in enumerate(documents, start=1):
        yield f"{'' if number == 1 else chr(10) * 2}Document {number}:\n{document}"


def hotpot_documents(example: Mapping[str, Any]) -> list[str]:
    """The paragraphs of a HotpotQA example, each with its title on the first line."""
    return [f"{title}\n{''.join(sentences)}" for title, sentences in example["context"]]


def write_corpus(path: str | Path, documents: Iterable[str]) -> int:
    """Write documents as a corpus and say how many they were."""
    with Path(path).open("wb") as file:
        return _write(file, documents)


def _write(file: BinaryIO, documents: Iterable[str]) -> int:
    count = 0
    for document in documents:
        file.write(json.dumps({"text": document}).encode() + b"\n")
        count += 1
    return count


def _unpacked(path: Path) -> int:
    """A descriptor, at its start, of a nameless file with the documents as JSON lines."""
    with tempfile.TemporaryFile() as file:
        if ".jsonl" in path.suffixes:
            _write(file, (_text_of(row) for _, row in read_rows(path)))
        else:
            _write(file, sorted(_hotpot_pool(path)))
        file.seek(0)
        return os.dup(file.fileno())


def _hotpot_pool(path: Path) -> set[str]:
    pool: set[str] = set()
    for place, row in read_rows(path):
        try:
            pool.update(hotpot_documents(row))
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{place}: not an example of HotpotQA, whose context is [[title, [sentences]]]") from error
    return pool


def _text_of(row: Mapping[str, Any]) -> str:
    text = row["text"]
    if not isinstance(text, str):
        raise TypeError(f"the text of a document must be a string, got {type(text).__name__}")
    return text
