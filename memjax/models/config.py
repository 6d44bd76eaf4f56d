"""The shape of a Qwen2 model, as Hugging Face's config.json tells it, and how a process runs it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from memjax.models.rope import RopeConfig
from memjax.sharding import Layout

log = logging.getLogger(__name__)

AttentionBody = Literal["auto", "einsum", "blockwise", "splash", "cudnn"]


@dataclass(frozen=True)
class ModelOptions:
    """How a process runs a model; nothing here changes what the model means.

    Matrices are stored in `param_dtype` and multiplied in the narrower of it and `compute_dtype`, in which activations
    travel. `scan_layers` stacks the layers on a leading axis and loops over them: compile time stays constant, but on
    CPU decoding is 2.9x slower than unrolled. `remat` recomputes each layer in the backward pass.
    """

    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    scan_layers: bool = False
    remat: bool = False
    attention: AttentionBody = "auto"
    layout: Layout | None = None

    @property
    def platform(self) -> str:
        """Where the model runs: the platform of the layout's mesh, or the default one."""
        return self.layout.mesh.devices.flat[0].platform if self.layout else jax.default_backend()


def default_param_dtype() -> jnp.dtype:
    """bfloat16, except on CPUs that multiply it slower than float32 because they lack instructions for it."""
    if jax.default_backend() != "cpu":
        return jnp.dtype(jnp.bfloat16)
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux
        flags = []
    return jnp.dtype(jnp.bfloat16 if {"avx512_bf16", "amx_bf16"} & set(flags) else jnp.float32)


@dataclass(frozen=True)
class Qwen2Config:
    """The shape of a Qwen2 model. Token ids stay as the file gives them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to rotate pairs, got {self.head_dim}")

    @property
    def trained_window(self) -> int:
        """The most tokens that the model was made for, YaRN's stretch included."""
        stretched = self.rope.factor * self.rope.original_max_position_embeddings
        return max(self.max_position_embeddings, int(stretched))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Qwen2Config:
        """Read the contents of a Hugging Face config.json; what this model cannot do is refused."""
        _refuse_other_models(raw)
        _refuse_two_dtypes(raw)
        missing = [
            name
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            if raw.get(name) is None
        ]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        length = raw.get("max_position_embeddings", 32_768)
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=length,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=_read_rope(raw, length),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            initializer_range=raw.get("initializer_range", 0.02),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of config.json, RoPE in the one spelling that transformers 4, transformers 5 and vLLM all read.

        A `rope_parameters` beside it would be a second place for the same setting.
        """
        eos = self.eos_token_id
        scaling = _write_yarn(self.rope) if self.rope.kind == "yarn" else None
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
        }


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    quantised = raw.get("quantization_config") or raw.get("compression_config") or raw.get("quantization")
    if quantised:  # the last is MLX's, which names no method
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(
            f"its weights are quantised ({method or f'{quantised}'}); memjax runs unquantised directories and GGUF "
            "files: take the model that it was made from, or a GGUF of it"
        )
    model_type = raw.get("model_type")
    if model_type != "qwen2":
        raise ValueError(f"model_type is {model_type!r}; memjax runs 'qwen2' (Qwen2, Qwen2.5) only")
    architectures = raw.get("architectures") or ["Qwen2ForCausalLM"]
    if list(architectures) != ["Qwen2ForCausalLM"]:
        raise ValueError(f"architectures is {architectures!r}; memjax runs 'Qwen2ForCausalLM' only")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; memjax runs 'silu' only")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; memjax attends to the whole window: set it to false")
    other = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(f"layer_types names {', '.join(other)}; memjax runs 'full_attention' only")


_YARN_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")  # of which each may have its own RoPE
_HARMLESS = {"finetuned": (True, False), "partial_rotary_factor": (1, 1.0)}  # keys whose named values change nothing


def _read_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5), `rope_scaling` and `rope_theta` (before), or all of them.

    What only one place says counts, whichever it is: a plain one beside YaRN is what transformers writes and the person
    who added YaRN left there. ValueError where two say different things.
    """
    places = [_rope_place(name, raw[name]) for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    if raw.get("rope_theta") is not None:
        places.append({"rope_theta": ("rope_theta", _positive("rope_theta", raw["rope_theta"]))})
    kinds = [place["kind"] for place in places if "kind" in place]
    stretched = [kind for kind in kinds if kind[1] != "default"]
    given: dict[str, Any] = {}
    for name in ("kind", "rope_theta", *_YARN_FIELDS):
        said = [place[name] for place in places if name in place] if name != "kind" else stretched
        given |= {name: _agreed(name, said)} if said else {}
    theta = given.get("rope_theta", 10_000.0)
    if "kind" not in given:
        if given.get("factor", 1.0) != 1.0:
            raise ValueError(f"RoPE has a factor of {given['factor']}, but no rope_type: add the type, such as 'yarn'")
        return RopeConfig(theta=theta)
    original = given.get("original_max_position_embeddings") or max_positions
    factor = given.get("factor") or max_positions / original
    if factor * original < max_positions:
        log.warning(
            "max_position_embeddings is %d, but YaRN stretches %d positions by %g to %d only: what lies beyond them "
            "may be read badly",
            *(max_positions, original, factor, int(factor * original)),
        )
    fields = {name: given[name] for name in _YARN_FIELDS if name in given}
    return RopeConfig(
        theta=theta, kind="yarn", **(fields | {"factor": factor, "original_max_position_embeddings": original})
    )


def _rope_place(name: str, values: Any) -> dict[str, tuple[str, Any]]:
    """What one dictionary says: each field with the key that it stands under. Refuses what memjax does not know."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is {values!r}; it should be an object, such as {{'rope_type': 'default'}}")
    layers = {key: values[key] for key in _LAYER_TYPES if key in values}
    if layers:
        if other := sorted(values.keys() - layers.keys()):
            raise ValueError(f"{name} has {', '.join(other)} beside {', '.join(layers)}: give one or the other")
        read = {key: _rope_place(f"{name}.{key}", value or {}) for key, value in layers.items()}
        first, *rest = ({field: value for field, (_, value) in place.items()} for place in read.values())
        if any(other != first for other in rest):
            raise ValueError(f"{name} differs between layers: {dict(layers)}; memjax runs one RoPE for all layers")
        return next(iter(read.values()))
    found: dict[str, tuple[str, Any]] = {}
    types = [(f"{name}.{key}", values[key]) for key in ("rope_type", "type") if values.get(key) is not None]
    kind = _agreed("kind", types) if types else None
    for key, value in values.items():
        where = f"{name}.{key}"
        if value is None or key in ("rope_type", "type") or (key in _HARMLESS and value in _HARMLESS[key]):
            continue
        if key == "truncate" and isinstance(value, bool):
            found[key] = where, value
        elif key == "original_max_position_embeddings":
            found[key] = where, int(_positive(where, value))
        elif key == "rope_theta" or (key in _YARN_FIELDS and key != "truncate"):
            found[key] = where, _positive(where, value)
        else:
            raise ValueError(f"{where} is {value!r}, which memjax does not know: it would be left out in silence")
    factor = found.get("factor", (name, None))[1]
    if kind == "linear" and factor == 1.0:
        kind = "default"
    if kind not in (None, "default", "yarn"):
        raise ValueError(f"rope type is {kind!r} ({types[0][0]}); memjax runs 'default' and 'yarn'")
    if kind == "default" and factor not in (None, 1.0):
        raise ValueError(
            f"{types[0][0]} is 'default', but {name}.factor is {factor}: set the type to 'yarn', or drop the factor"
        )
    if kind == "default":
        found = {key: value for key, value in found.items() if key == "rope_theta"}
    return found | ({"kind": (types[0][0], kind)} if kind else {})


def _agreed(name: str, said: Sequence[tuple[str, Any]]) -> Any:
    """The one value that all places give. ValueError with the first two that differ."""
    (place, value), *rest = said
    for other_place, other in rest:
        if other != value:
            raise ValueError(f"{place} is {value!r}, but {other_place} is {other!r}: keep one of them")
    return value


def _positive(place: str, value: Any) -> float:
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{place} is {value!r}; it should be a positive number")
    return number


def _refuse_two_dtypes(raw: Mapping[str, Any]) -> None:
    """Nothing is read as these say, for the files tell their own; but what disagrees was not meant so."""
    spelled = [(key, str(raw[key]).removeprefix("torch.")) for key in ("dtype", "torch_dtype") if raw.get(key)]
    if spelled:
        _agreed("dtype", spelled)


def _write_yarn(rope: RopeConfig) -> dict[str, Any]:
    fields = {name: getattr(rope, name) for name in _YARN_FIELDS}
    return {"type": "yarn", "rope_type": "yarn"} | {k: v for k, v in fields.items() if v is not None}
