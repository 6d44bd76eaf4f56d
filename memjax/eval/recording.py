"""A client that notes what one sample asked for, what came back, and where watched text went by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memjax.rollout.client import Client, Part, Prompt
from memjax.trajectory import Completion, SamplingParams

# A chunk border may cut a watched text in two; this much of its start or end is enough to know it by.
_MARK = 60
# A shorter memory could stand inside ordinary words of the chunk, so it is not cut out of a prompt by search.
_SEARCHABLE = 20


@dataclass(frozen=True)
class Turn:
    """One call of the model: its reply, its cost, and which watched texts its prompt showed."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    truncated: bool
    shown: tuple[bool, ...]


class RecordingClient:
    """Passes every call on to `client` and keeps the turns of one sample. It holds no document text.

    `watched` are groups of texts: a group was shown when one of its texts was. `decode` turns id parts into text.
    """

    def __init__(
        self,
        client: Client,
        decode: Callable[[Sequence[int]], str],
        question: str = "",
        watched: Sequence[Sequence[str]] = (),
    ) -> None:
        self._client = client
        self._decode = decode
        self._question = _squeezed(question)
        self._marks = [[mark for text in texts for mark in _marks(text)] for texts in watched]
        self._memory = ""
        self._hash = hashlib.sha256()
        self.model = client.model
        self.window = client.window
        self.turns: list[Turn] = []

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of every prompt of the sample, in order."""
        return self._hash.hexdigest()

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """The wrapped client's completions; the first of them is taken as the reply."""
        parts = self._text_parts(prompt)
        self._hash.update("\0".join(parts).encode())
        shown = self._shown(parts)
        completions = await self._client.complete(prompt, params)
        first = completions[0]
        self.turns.append(
            Turn(
                text=first.text,
                prompt_tokens=first.prompt_tokens or len(first.prompt_ids),
                completion_tokens=sum(done.completion_tokens or len(done.token_ids) for done in completions),
                cached_tokens=first.cached_tokens,
                truncated=first.finish_reason == "length",
                shown=shown,
            )
        )
        # An empty update leaves the memory as it was.
        self._memory = _squeezed(first.text) or self._memory
        return completions

    async def close(self) -> None:
        """The wrapped client outlives the sample."""

    def _text_parts(self, prompt: Prompt) -> list[str]:
        return [self._as_text(part) for message in prompt.messages for part in message.content]

    def _as_text(self, part: Part) -> str:
        return part if isinstance(part, str) else self._decode(part)

    def _shown(self, parts: Sequence[str]) -> tuple[bool, ...]:
        """Which groups the prompt holds once the question and the memory are taken out."""
        if not self._marks:
            return ()
        squeezed = [_squeezed(part) for part in parts]
        text = " ".join(part for part in squeezed if part not in (self._question, self._memory))
        if len(self._memory) >= _SEARCHABLE:
            text = text.replace(self._memory, " ")
        if self._question:
            text = text.replace(self._question, " ")
        return tuple(any(mark in text for mark in marks) for marks in self._marks)


def _squeezed(text: str) -> str:
    """Lower case, single spaces: what survives another line break or a decoding round trip."""
    return " ".join(text.casefold().split())


def _marks(text: str) -> tuple[str, ...]:
    squeezed = _squeezed(text)
    return (squeezed[:_MARK], squeezed[-_MARK:]) if len(squeezed) > _MARK else (squeezed,)
