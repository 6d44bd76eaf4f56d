"""Two threads that start programs on the same devices take turns, so that all devices see the programs in one order.

Programs that exchange data between devices wait for one another: begun in different orders, they would wait for ever.
Only the start is in turn; a program that runs does not hold the other thread up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import numpy as np

from memjax.rollout.engine import DecodeState, Engine, Prefix, PrefixRows, SampledTokens
from memjax.rollout.weights import WeightStore

Given = ParamSpec("Given")
Made = TypeVar("Made")


def in_turn(call: Callable[Given, Made], turn: threading.Lock) -> Callable[Given, Made]:
    """The call, made while no other of the same turn is."""

    def call_in_turn(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with turn:
            return call(*args, **kwargs)

    return call_in_turn


class EngineInTurn(Engine):
    """An engine whose programs start in turn."""

    def __init__(self, *args: Any, turn: threading.Lock, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._turn = turn

    def prefill_pieces(
        self, *, params: WeightStore, existing_prefix: Prefix | None = None, tokens: np.ndarray
    ) -> Generator[int, None, Prefix]:
        """As the engine's."""
        pieces = super().prefill_pieces(params=params, existing_prefix=existing_prefix, tokens=tokens)
        while True:
            with self._turn:
                try:
                    taken = next(pieces)
                except StopIteration as done:
                    return done.value
            yield taken

    def prefill_rows(self, *args: Any, **kwargs: Any) -> PrefixRows:
        """As the engine's."""
        with self._turn:
            return super().prefill_rows(*args, **kwargs)

    def insert_rows(self, *args: Any, **kwargs: Any) -> DecodeState:
        """As the engine's, which `insert` calls too."""
        with self._turn:
            return super().insert_rows(*args, **kwargs)

    def generate(self, params: WeightStore, decode_state: DecodeState) -> tuple[DecodeState, SampledTokens]:
        """As the engine's."""
        with self._turn:
            return super().generate(params, decode_state)
