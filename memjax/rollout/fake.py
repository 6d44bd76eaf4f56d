"""A client whose replies are known beforehand, and a tokenizer whose ids are bytes."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memjax.rollout.client import Message, Prompt
from memjax.trajectory import Completion, SamplingParams

EOS_ID = 256


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 to end a reply."""

    size = 257
    eos_ids = (EOS_ID,)
    pad_id = EOS_ID

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def encode_reply(self, text: str) -> list[int]:
        """The bytes of the text."""
        return self.encode(text)

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[int]:
        """The bytes of the joined pieces."""
        for piece in pieces:
            yield from piece.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text, without the end id."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def count(self, text: str) -> int:
        """Bytes in the text."""
        return len(text.encode())

    def char_boundary(self, ids: Sequence[int], n: int) -> int:
        """The largest k <= n such that ids[:k] does not end inside a character."""
        k = min(n, len(ids))
        lead = k - 1
        while lead > 0 and 0x80 <= ids[lead] < 0xC0:
            lead -= 1
        if k == 0 or not 0xC0 <= ids[lead] < 0x100:
            return k
        length = 2 if ids[lead] < 0xE0 else 3 if ids[lead] < 0xF0 else 4
        return lead if lead + length > k else k

    def pieces_of(self, ids: Sequence[int]) -> list[bytes]:
        """A byte for each id."""
        return [bytes([i]) for i in ids]

    def ids_of(self, pieces: Sequence[bytes]) -> list[int]:
        """The ids whose bytes these are."""
        return [piece[0] for piece in pieces]

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """The tools, then the parts between the plainest of chat markers."""
        ids = self.encode(f"[tools]{json.dumps(tools)}" if tools else "")
        for message in messages:
            ids += self.encode(f"[{message.role}]")
            for part in message.content:
                ids += self.encode(part) if isinstance(part, str) else part
            for call in message.tool_calls:
                ids += self.encode(f"[call {call.name} {call.json}]")
        return ids + self.encode("[assistant]") if generation_prompt else ids


_NOTHING = "- nothing"

Reply = Callable[[str, SamplingParams], str]
"""From the text of a prompt to what the model says."""


class ScriptedClient:
    """Answers every prompt with `reply`; keeps the prompts it was given.

    Replies are cut at `max_tokens` like a model's, and carry ids unless `text_only`.
    """

    def __init__(
        self, reply: Reply, *, window: int | None = None, text_only: bool = False, model: str = "scripted"
    ) -> None:
        self.model = model
        self.window = window
        self.prompts: list[Prompt] = []
        self.params: list[SamplingParams] = []
        self._reply = reply
        self._text_only = text_only
        self._tokenizer = ByteTokenizer()

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """Reply `params.n` times; ValueError where prompt and reply cannot fit the window."""
        prompt_ids = self._tokenizer.render(prompt.messages, tools=prompt.tools)
        if self.window is not None and len(prompt_ids) + params.max_tokens > self.window:
            raise ValueError(
                f"{len(prompt_ids)} + {params.max_tokens} tokens are more than the window of {self.window}"
            )
        self.prompts.append(prompt)
        self.params.append(params)
        text = "\n".join(message.text(self._tokenizer.decode) for message in prompt.messages)
        return [self._completion(prompt_ids, self._reply(text, params), params.max_tokens) for _ in range(params.n)]

    async def close(self) -> None:
        """Nothing to release."""

    def _completion(self, prompt_ids: list[int], reply: str, max_tokens: int) -> Completion:
        ids = [*self._tokenizer.encode(reply), EOS_ID]
        cut = ids[: self._tokenizer.char_boundary(ids, max_tokens)]
        empty: list[int] = []
        return Completion(
            prompt_ids=np.asarray(empty if self._text_only else prompt_ids, np.int32),
            token_ids=np.asarray(empty if self._text_only else cut, np.int32),
            logprobs=np.zeros(0 if self._text_only else len(cut), np.float32),
            text=self._tokenizer.decode(cut),
            finish_reason="stop" if cut == ids else "length",
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(cut),
        )


@dataclass(frozen=True)
class NeedleReader:
    """A reader of our bundled prompts that notes what matches `pattern` and forgets with a known probability.

    At every section it first loses each noted match with probability `forget`, then notes the matches of the section
    (their last group, if there is one); its answer is the box of what is left. So a fact that is followed by k sections
    is answered with probability (1 - forget) ** k. What it forgets depends on `seed` and the prompt alone.
    """

    pattern: str
    forget: float = 0.0
    seed: int = 0

    def __call__(self, prompt: str, params: SamplingParams) -> str:
        """Read one prompt."""
        notes = _between_tags(prompt, "memory").splitlines()
        facts = [line.removeprefix("- ") for line in notes if line.startswith("- ") and line != _NOTHING]
        section = _between_tags(prompt, "section")
        if not section:
            return f"\\boxed{{{', '.join(facts)}}}"
        digest = hashlib.sha256(f"{self.seed}\n{params.seed}\n{prompt}".encode()).digest()
        chance = random.Random(digest)
        facts = [fact for fact in facts if chance.random() >= self.forget]
        found = (match[match.lastindex or 0] for match in re.finditer(self.pattern, section))
        return "\n".join(f"- {fact}" for fact in dict.fromkeys([*facts, *found])) or _NOTHING


def _between_tags(text: str, tag: str) -> str:
    match = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", text, re.DOTALL)
    return match[1] if match else ""
