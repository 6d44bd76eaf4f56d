"""The short answer inside a model's reply."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s*\{")
_TEXT = re.compile(r"\\text(?:bf|it|rm)?\s*\{")
_OTHER_ESCAPE = re.compile(r"\\(?=[{}$%&#_])")


def extract_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`, without its `\text{}` wrappers; None where there is none.

    An unclosed box, as a reply cut off at its token limit leaves it, is passed over for the one before it.
    """
    for match in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, match.end())
        if end is not None:
            return _unwrap(text[match.end() : end]).strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one just before `start`; a brace after a backslash is text."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    return None


def _unwrap(text: str) -> str:
    r"""Replace each `\text{...}` by what it holds, and each escaped LaTeX sign by the sign."""
    while match := _TEXT.search(text):
        end = _closing_brace(text, match.end())
        if end is None:
            break
        text = text[: match.start()] + text[match.end() : end] + text[end + 1 :]
    return _OTHER_ESCAPE.sub("", text)
