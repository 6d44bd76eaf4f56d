"""The one place that touches the jetstream package: what it needs to work today, and stand-ins where it is absent."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from memjax.tokenizer import Tokenizer


@contextmanager
def _seqio_stand_in() -> Iterator[None]:
    """Let jetstream import seqio's two vocabulary classes, which it names and we never use, without TensorFlow."""
    if "seqio" in sys.modules or importlib.util.find_spec("seqio") is not None:
        yield
        return
    seqio, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("SentencePieceVocabulary", "Vocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    setattr(seqio, "vocabularies", vocabularies)  # noqa: B010 (mypy knows no such attribute of a module)
    sys.modules |= {"seqio": seqio, "seqio.vocabularies": vocabularies}
    try:
        yield
    finally:
        del sys.modules["seqio"], sys.modules["seqio.vocabularies"]


try:
    with _seqio_stand_in():
        from jetstream.engine.engine_api import Engine, ResultTokens
        from jetstream.engine.tokenizer_pb2 import TokenizerParameters
    INSTALLED = True
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] != "jetstream":
        raise
    INSTALLED = False

    class Engine:  # type: ignore[no-redef]
        """A base without calls: memjax's engine has them all."""

    @dataclass(frozen=True)
    class ResultTokens:  # type: ignore[no-redef]
        """A step's results in one integer array, and which of its columns hold what."""

        data: Any
        tokens_idx: tuple[int, int]
        valid_idx: tuple[int, int]
        length_idx: tuple[int, int]
        samples_per_slot: int

    @dataclass(frozen=True)
    class TokenizerParameters:  # type: ignore[no-redef]
        """Where a tokenizer comes from."""

        path: str = ""


PREFILL_LENGTHS = tuple(16 << shift for shift in range(12))
"""The only values that jetstream's padding takes for `max_prefill_length`."""


def load_orchestrator() -> types.ModuleType:
    """Import jetstream's orchestrator, mended: its logging is undone and its `delete_pytree` works on today's JAX.

    Its import sets the root logger to DEBUG and gives it a handler on standard output; `delete_pytree` calls
    `jax.tree_map`, which is gone, and the driver answers the error by killing the process.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with _seqio_stand_in():
        from jetstream.core import orchestrator
    root.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    orchestrator.delete_pytree = _delete_pytree
    return orchestrator


def _delete_pytree(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


class DriverTokenizer:
    """A memjax tokenizer with the methods that jetstream's driver calls.

    The driver decodes one token at a time, which breaks characters that span tokens: clients of the stock driver should
    ask for token ids.
    """

    def __init__(self, tokenizer: Tokenizer, max_prefill_length: int):
        self._tokenizer = tokenizer
        self._max_prefill_length = max_prefill_length

    def encode(self, text: str, **_: Any) -> tuple[np.ndarray, int]:
        """Token ids, padded to one of jetstream's lengths, and how many of them are real."""
        ids = self._tokenizer.encode(text)
        if len(ids) > self._max_prefill_length:
            raise ValueError(f"the text has {len(ids)} tokens, more than the {self._max_prefill_length} that fit")
        padded = next(length for length in PREFILL_LENGTHS if length >= len(ids))
        return np.pad(np.asarray(ids, np.int32), (0, padded - len(ids))), len(ids)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """The text of the ids."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """What the driver pads token requests with; never attended to."""
        return 0

    @property
    def bos_id(self) -> int:
        """What the driver puts before a request without a session; Qwen has none, so a request must name one."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of the ids that end a sequence."""
        return min(self.stop_tokens)

    @property
    def stop_tokens(self) -> set[int]:
        """All ids that end a sequence."""
        return set(self._tokenizer.eos_ids)
