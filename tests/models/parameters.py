"""Random parameters for model tests, from numpy by Hugging Face name."""

import jax.numpy as jnp
from golden.qwen2_cases import tensors

from memjax.models.config import Qwen2Config
from memjax.models.qwen2 import Params


def golden_params(raw: dict) -> Params:
    """The unrolled parameter tree with the weights that the golden values were made with."""
    tree: Params = {}
    for name, value in tensors(raw).items():
        *path, leaf = name.removeprefix("model.").split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(value)
    return tree


def small(**changes) -> tuple[Qwen2Config, Params]:
    """A config and its parameters: 3 layers, 8 query heads on 2 kv heads of size 8, vocabulary 96, unless changed."""
    raw = {
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    } | changes
    return Qwen2Config.from_hf(raw), golden_params(raw)
