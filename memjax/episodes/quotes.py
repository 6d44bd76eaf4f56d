"""Parts of a prompt that know where they come from, so that a journal can name them instead of repeating them."""

from __future__ import annotations

from collections.abc import Iterable

CHUNK: tuple[()] = ()
"""The source of ids that are a chunk of a document; any other source is the key of a reply."""


class Quote(tuple[int, ...]):
    """Token ids taken from a reply or a chunk."""

    source: tuple[int | str, ...]

    def __new__(cls, ids: Iterable[int], source: tuple[int | str, ...]) -> Quote:
        """`source` is CHUNK or the key of a reply."""
        self = super().__new__(cls, ids)
        self.source = source
        return self


class QuotedText(str):
    """The text of a reply that has no ids."""

    source: tuple[int | str, ...]

    def __new__(cls, text: str, source: tuple[int | str, ...]) -> QuotedText:
        """`source` is the key of the reply."""
        self = super().__new__(cls, text)
        self.source = source
        return self
