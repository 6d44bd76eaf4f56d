"""What a RULER task decides before its length is known, and the text it becomes once it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

NOISE_LINE = (
    "The kettle is on the stove. Rain taps at the window. Somebody reads a letter. The street is quiet. Evening comes."
    "\n"
)
"""Filler that says nothing: five short sentences, repeated as often as it takes."""


class Draft(Protocol):
    """One question with its answers, and a context of any number of units.

    `evidence` are the passages that answer it, in order; each is one piece of every context.
    """

    @property
    def question(self) -> str: ...  # noqa: D102

    @property
    def answers(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def evidence(self) -> tuple[str, ...]: ...  # noqa: D102

    def pieces(self, units: int) -> Iterator[str]:
        """The context made of this many units of filler."""
        ...


@dataclass(frozen=True)
class DraftText:
    """A draft's context at a fixed length: regenerated on every reading, never held."""

    name: str
    draft: Draft
    units: int

    def pieces(self) -> Iterator[str]:
        """Yield the context piece by piece."""
        return self.draft.pieces(self.units)


def spans(text: DraftText) -> list[dict[str, int | str]]:
    """Where the evidence stands: its text and the characters [start, end) of the context that it takes."""
    wanted = set(text.draft.evidence)
    found: list[dict[str, int | str]] = []
    at = 0
    for piece in text.pieces():
        if piece in wanted:
            found.append({"text": piece.strip(), "start": at, "end": at + len(piece)})
        at += len(piece)
    return found
