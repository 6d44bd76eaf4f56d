"""The shapes of the published Qwen2.5 models, for what needs a shape and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memjax.models.config import Qwen2Config
from memjax.models.rope import RopeConfig

TOKENIZER_SIZE = 151_665
"""Ids of Qwen2.5's tokenizer; the models' vocabularies are padded beyond it."""


def _shape(
    vocabulary: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=tied,
    )


# Their config.json files.
QWEN2_5: Mapping[str, Qwen2Config] = MappingProxyType(
    {
        "0.5B": _shape(151_936, 896, 4864, 24, 14, 2, tied=True),
        "1.5B": _shape(151_936, 1536, 8960, 28, 12, 2, tied=True),
        "3B": _shape(151_936, 2048, 11_008, 36, 16, 2, tied=True),
        "7B": _shape(152_064, 3584, 18_944, 28, 28, 4),
        "14B": _shape(152_064, 5120, 13_824, 48, 40, 8),
        "32B": _shape(152_064, 5120, 27_648, 64, 40, 8),
        "72B": _shape(152_064, 8192, 29_568, 80, 64, 8),
    }
)


def published_size(name: str) -> str | None:
    """The size that a hub id such as Qwen/Qwen2.5-7B-Instruct tells; None where it tells none of these."""
    _, known, rest = name.partition("Qwen2.5-")
    size = rest.removeprefix("Coder-").partition("-")[0]
    return size if known and size in QWEN2_5 else None
