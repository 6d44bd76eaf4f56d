"""A tiny random Qwen2 in a Hugging Face directory, with a byte-level tokenizer and a chat template, for every test.

The weights are written with safetensors alone, so that what reads them is tested against something else than itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from memjax.models.config import Qwen2Config
from memjax.tokenizer_files import added_token, byte_alphabet, qwen2_definition, write_json

_MERGES = ["Ġ t", "h e", "Ġt he", "Ġ a", "i n", "e r", "o n", "Ġ s", "r e", "Ġ w", "a t", "n d", "Ġa nd", "Ġ i", "e s"]
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOOL = ["<tool_call>", "</tool_call>"]  # added, but not special, as in Qwen2.5

CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_definition() -> dict[str, Any]:
    """A tokenizer.json of 256 bytes, a few merges and five added tokens: 276 ids."""
    tokens = [*byte_alphabet().values(), *(merge.replace(" ", "") for merge in _MERGES)]
    added = [added_token(len(tokens) + i, text, text in _CONTROL) for i, text in enumerate(_CONTROL + _TOOL)]
    return qwen2_definition({token: i for i, token in enumerate(tokens)}, _MERGES, added)


TINY_SIZE = 256 + len(_MERGES) + len(_CONTROL) + len(_TOOL)


def tiny_config(**changes: Any) -> Qwen2Config:
    """A config with every feature of Qwen2: grouped heads, padded vocabulary, and end ids that are a list."""
    fields: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": (273, 271),
        "pad_token_id": 271,
    }
    return Qwen2Config(**(fields | changes))


def tiny_weights(config: Qwen2Config, *, seed: int = 0, std: float = 0.1) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names; std 0.1 makes attention matter (at 0.02 it hardly does)."""
    rng = np.random.default_rng(seed)
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * h, config.num_key_value_heads * h
    layer = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (d, q),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return {
        name: (std * rng.standard_normal(shape) + name.endswith("norm.weight")).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_tiny_tokenizer(directory: Path, *, chat: bool = True) -> Path:
    """The tokenizer files alone; without `chat` there is no template, as in a base model."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>" if chat else "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE if chat else None,
        "model_max_length": 4096,
    }
    write_json(directory / "tokenizer.json", tiny_definition())
    write_json(directory / "tokenizer_config.json", settings)
    return directory


def write_tiny_model(
    directory: Path, config: Qwen2Config | None = None, *, seed: int = 0, dtype: Any = np.float32, chat: bool = True
) -> Path:
    """A whole model directory; `dtype` may be ml_dtypes' bfloat16."""
    config = config or tiny_config()
    write_tiny_tokenizer(directory, chat=chat)
    write_json(directory / "config.json", config.to_hf())
    weights = {name: array.astype(dtype) for name, array in tiny_weights(config, seed=seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.tiny_model DIRECTORY   (writes a tiny random model there)")
    write_tiny_model(Path(sys.argv[1]))
