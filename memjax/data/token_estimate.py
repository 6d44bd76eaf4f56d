"""Counting tokens roughly for a service whose tokenizer is not at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memjax.tokenizer import MessageLike

# Up to four Latin letters with the space before them, or any one character. English prose comes out a fifth to a third
# above the count of common tokenizers, digits, symbols and other scripts at or above it: too many, never far too few.
_TOKEN = re.compile(r" ?[A-Za-z]{1,4}|.", re.DOTALL)

TEMPLATE_TOKENS = 64
"""Allowed for the chat template of a service: role markers and a default system message."""


class EstimatedTokenizer:
    """Stands in for a tokenizer where only counts and cuts matter.

    Its ids number the pieces of text it has met and mean nothing to a model; they decode to the text they came from.
    """

    eos_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: dict[str, int] = {}

    def _id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]

    def encode(self, text: str) -> list[int]:
        """Ids of the text."""
        return [self._id(piece) for piece in _TOKEN.findall(text)]

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[int]:
        """The ids of the joined pieces."""
        held = ""
        for piece in pieces:
            *ready, held = _TOKEN.findall(held + piece) or [""]
            yield from map(self._id, ready)
        yield from map(self._id, _TOKEN.findall(held))

    def decode(self, ids: Sequence[int]) -> str:
        """The text the ids came from."""
        return "".join(self._texts[i] for i in ids)

    def pieces_of(self, ids: Sequence[int]) -> list[bytes]:
        """The UTF-8 bytes of each piece of text."""
        return [self._texts[i].encode("utf-8", "replace") for i in ids]

    def ids_of(self, pieces: Sequence[bytes]) -> list[int]:
        """The ids of pieces of text."""
        return [self._id(piece.decode()) for piece in pieces]

    def count(self, text: str) -> int:
        """About how many tokens a service will see in the text, rather too many than too few."""
        return len(_TOKEN.findall(text))

    def char_boundary(self, ids: Sequence[int], n: int) -> int:
        """The estimate never splits a character."""
        return min(n, len(ids))

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> list[int]:
        """Ids in the number that the messages may take in a service's chat template."""
        parts = [part for message in messages for part in message.content]
        texts = [part if isinstance(part, str) else self.decode(part) for part in parts]
        texts += [call.name + call.json for message in messages for call in message.tool_calls]
        texts += [json.dumps(tool, ensure_ascii=False) for tool in tools]
        return self.encode("".join(texts) + "." * TEMPLATE_TOKENS)
