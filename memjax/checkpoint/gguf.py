"""GGUF files of Qwen2: the config that their metadata amounts to, and their tensors, dequantised as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memjax.checkpoint.tensors import Index, listing, read_bytes
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
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 256
_SAME_MATRIX_COSINE = 0.9  # two roundings of one matrix reach 0.99; an embedding and a head of their own stay far below


class GGUFModel:
    """A GGUF file as a config and tensors with Hugging Face's names."""

    def __init__(self, path: Path):
        self.path = path
        file = read_gguf(path)
        _refuse_other_files(file)
        self._tensors = {_hf_name(name): info for name, info in file.tensors.items()}
        _check_length(path, path.stat().st_size, file.tensors.values())
        if _EMBEDDING not in self._tensors:
            raise ValueError(f"{path} has no token_embd.weight; it holds {listing(sorted(file.tensors))}")
        tied = _HEAD not in self._tensors or self._is_head_the_embedding()
        if tied and _HEAD in self._tensors:
            # One matrix rounded twice: the head's copy is the finer one, and a tied model has only one.
            self._tensors[_EMBEDDING] = self._tensors.pop(_HEAD)
        self.shapes = {name: info.shape for name, info in self._tensors.items()}
        self.config = _config(file, vocab_size=self.shapes[_EMBEDDING][0], tied=tied)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Rows of one tensor as float32; only they are dequantised."""
        from gguf.quants import dequantize

        info = self._tensors[name]
        if len(info.shape) == 1:
            data = read_bytes(self.path, info.offset, _row_bytes(info))
            return dequantize(data, _quantization(info))[index]
        rows, *rest = index
        width = _row_bytes(info)
        data = read_bytes(self.path, info.offset + rows.start * width, (rows.stop - rows.start) * width)
        return dequantize(data.reshape(-1, width), _quantization(info))[(slice(None), *rest)]

    def _is_head_the_embedding(self) -> bool:
        embedding, head = self._tensors[_EMBEDDING], self._tensors[_HEAD]
        if embedding.shape != head.shape:
            return False
        rows = (slice(0, _COMPARED_ROWS), slice(0, head.shape[1]))
        a, b = self.read(_EMBEDDING, rows), self.read(_HEAD, rows)
        return bool(np.sum(a * b) > _SAME_MATRIX_COSINE * np.linalg.norm(a) * np.linalg.norm(b))


def _refuse_other_files(file: GGUFFile) -> None:
    architecture = file.metadata.get("general.architecture")
    if architecture != "qwen2":
        raise ValueError(f"{file.path} holds a model of architecture {architecture!r}; memjax runs 'qwen2' only")
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{file.path} is one of {parts} parts; join them with llama-gguf-split --merge")


def _check_length(path: Path, size: int, tensors: Any) -> None:
    end = max((info.offset + info.rows * _row_bytes(info) for info in tensors), default=0)
    if size < end:
        raise ValueError(f"{path} is truncated: {size} bytes of {end}; download it again")


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
    scaling = metadata.get("qwen2.rope.scaling.type", "none")
    if scaling != "none":
        raw["rope_scaling"] = {
            "rope_type": scaling,
            "factor": metadata.get("qwen2.rope.scaling.factor"),
            "original_max_position_embeddings": metadata.get("qwen2.rope.scaling.original_context_length"),
        }
    try:
        return Qwen2Config.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
