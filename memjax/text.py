"""Strings that are text: Python's may hold halves of characters, which can be neither encoded nor tokenised."""

from __future__ import annotations

from typing import Any


def whole_characters(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, as JavaScript's slice() leaves them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def whole_strings(value: Any) -> Any:
    """A JSON value with `whole_characters` in all its strings and keys."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, dict):
        return {whole_characters(key): whole_strings(item) for key, item in value.items()}
    return [whole_strings(item) for item in value] if isinstance(value, list) else value
