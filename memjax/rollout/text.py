"""Strings that are text: Python's may hold halves of characters, which can be neither encoded nor tokenised."""

from __future__ import annotations


def whole_characters(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, as JavaScript's slice() leaves them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
