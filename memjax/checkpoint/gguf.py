"""GGUF files of Qwen2: the config that their metadata amounts to, and their tensors, dequantised as they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from memjax.checkpoint.tensors import EMBEDDING, HEAD, Index, is_head_the_embedding, listing, read_bytes
from memjax.gguf_file import GGUFFile, TensorInfo, read_gguf
from memjax.models.config import Qwen2Config

# The qwen2 layout keeps Hugging Face's order of rows in q and k; only llama's is permuted.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SCALING = {
    "type": "rope_type",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


class GGUFModel:
    """A GGUF file as a config and tensors with Hugging Face's names."""

    def __init__(self, path: Path):
        self.path = path
        file = read_gguf(path)
        _refuse_other_files(file)
        self._tensors = {_hf_name(name): info for name, info in file.tensors.items()}
        _check_length(file.tensors.values())
        if EMBEDDING not in self._tensors:
            raise ValueError(f"{path} has no token_embd.weight; it holds {listing(sorted(file.tensors))}")
        self.shapes = {name: info.shape for name, info in self._tensors.items()}
        tied = HEAD not in self._tensors or is_head_the_embedding(self)
        if tied and HEAD in self._tensors:
            # One matrix rounded twice: the head's copy is the finer one, and a tied model has only one.
            self._tensors[EMBEDDING] = self._tensors.pop(HEAD)
        self.shapes = {name: info.shape for name, info in self._tensors.items()}
        self.config = _config(file, vocab_size=self.shapes[EMBEDDING][0], tied=tied)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Rows of one tensor as float32; only they are dequantised."""
        from gguf.quants import dequantize

        info = self._tensors[name]
        if len(info.shape) == 1:
            data = read_bytes(info.file, info.offset, _row_bytes(info))
            return dequantize(data, _quantization(info))[index]
        rows, *rest = index
        width = _row_bytes(info)
        data = read_bytes(info.file, info.offset + rows.start * width, (rows.stop - rows.start) * width)
        return dequantize(data.reshape(-1, width), _quantization(info))[(slice(None), *rest)]


def _refuse_other_files(file: GGUFFile) -> None:
    architecture = file.metadata.get("general.architecture")
    if architecture != "qwen2":
        raise ValueError(f"{file.path} holds a model of architecture {architecture!r}; memjax runs 'qwen2' only")


def _check_length(tensors: Iterable[TensorInfo]) -> None:
    ends: dict[Path, int] = {}
    for info in tensors:
        ends[info.file] = max(ends.get(info.file, 0), info.offset + info.rows * _row_bytes(info))
    for file, end in ends.items():
        if (size := file.stat().st_size) < end:
            raise ValueError(f"{file} is truncated: {size} bytes of {end}; download it again")


def _quantization(info: TensorInfo) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(info.ggml_type)


def _row_bytes(info: TensorInfo) -> int:
    from gguf import GGML_QUANT_SIZES

    try:
        elements, block_bytes = GGML_QUANT_SIZES[_quantization(info)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {info.name} has the unknown type {info.ggml_type}; use another file") from error
    return info.shape[-1] // elements * block_bytes


def _hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    return name


def _config(file: GGUFFile, *, vocab_size: int, tied: bool) -> Qwen2Config:
    metadata = file.metadata
    keys = {
        "hidden_size": "qwen2.embedding_length",
        "intermediate_size": "qwen2.feed_forward_length",
        "num_hidden_layers": "qwen2.block_count",
        "num_attention_heads": "qwen2.attention.head_count",
        "num_key_value_heads": "qwen2.attention.head_count_kv",
        "max_position_embeddings": "qwen2.context_length",
        "rms_norm_eps": "qwen2.attention.layer_norm_rms_epsilon",
    }
    if absent := [key for key in keys.values() if key not in metadata]:
        raise ValueError(f"{file.path} lacks {listing(absent)}; convert the model to GGUF again")
    raw: dict[str, Any] = {name: metadata[key] for name, key in keys.items()}
    raw |= {
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "head_dim": metadata.get("qwen2.attention.key_length"),
        "rms_norm_eps": float(f"{raw['rms_norm_eps']:.6g}"),  # kept as float32: 9.99999997e-07 is 1e-6
        "rope_theta": metadata.get("qwen2.rope.freq_base", 10_000.0),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    # What is here and not in the table below is refused by its own name rather than left out.
    prefix = "qwen2.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if scaling.get("attn_factor") == 1.0:
        del scaling["attn_factor"]
    if scaling.get("type", "none") != "none":
        raw["rope_scaling"] = {_SCALING.get(key, key): value for key, value in scaling.items()}
    old_spelling = metadata.get("qwen2.rope.scale_linear", 1.0)
    head_dim = raw["head_dim"] or raw["hidden_size"] // raw["num_attention_heads"]
    try:
        if old_spelling not in (0.0, 1.0):
            raise ValueError(f"qwen2.rope.scale_linear is {old_spelling}; memjax runs YaRN and unscaled RoPE")
        for key in ("qwen2.rope.dimension_count", "qwen2.attention.value_length"):
            if metadata.get(key, head_dim) != head_dim:
                raise ValueError(
                    f"{key} is {metadata[key]}, but heads have {head_dim} dimensions; memjax runs one size"
                )
        if metadata.get("qwen2.vocab_size", vocab_size) != vocab_size:
            raise ValueError(
                f"qwen2.vocab_size is {metadata['qwen2.vocab_size']}, but token_embd has {vocab_size} rows"
            )
        return Qwen2Config.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
