"""One sampled reply as it grows: its ids, log probabilities and text, and where it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memjax.tokenizer import StreamDecoder
from memjax.trajectory import FinishReason

if TYPE_CHECKING:
    from memjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scores:
    """How a model expected a prompt: of every token but the first, in order.

    `logprobs` are those of the tokens themselves, `top_logprobs` those of the likeliest ids in their places, `top_ids`;
    all at temperature 1.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class GrowingReply:
    """Takes sampled tokens one by one until an end id, a stop string or `max_tokens` ends it.

    `text` ends before the stop string; `token_ids` and `logprobs` keep everything that was sampled.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], stop: tuple[str, ...], max_tokens: int):
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._decoder = StreamDecoder(tokenizer)
        self._eos_ids, self._stop, self._max_tokens = eos_ids, stop, max_tokens
        self._shown = 0

    def push(self, token_id: int, logprob: float) -> None:
        """Take a token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        before = len(self.text)
        self.text += self._decoder.push(token_id)
        if token_id in self._eos_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            self.text += self._decoder.flush()
        stop_at = self._find_stop(before)
        if stop_at is not None:
            self.text, self.finish_reason = self.text[:stop_at], "stop"

    def take_text(self) -> str:
        """The text since the last call that can no longer turn out to begin a stop string."""
        end = len(self.text) if self.finish_reason else len(self.text) - self._held()
        taken = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return taken

    def _find_stop(self, before: int) -> int | None:
        """Where the first stop string starts that has characters past `before`."""
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        return min((at for at in found if at >= 0), default=None)

    def _held(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
