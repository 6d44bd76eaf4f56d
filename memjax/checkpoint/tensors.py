"""Tensors of a checkpoint by Hugging Face's names, and their way into a sharded parameter tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params, abstract_params

Index = tuple[slice, ...]

# Buffers that checkpoints of early transformers carry; they follow from the config.
_IGNORABLE = re.compile(r"rotary_emb\.inv_freq$")
_BLOCK_ELEMENTS = 1 << 24  # what is read, dequantised and cast at a time
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 256
_SAME_MATRIX_COSINE = 0.9  # two roundings of one matrix reach 0.99; an embedding and a head of their own stay far below
_MOST_NAMES = 8  # of each kind of fault in one message


class TensorSource(Protocol):
    """Tensors that are read slice by slice."""

    path: Path  # where they are, for messages
    shapes: dict[str, tuple[int, ...]]  # by Hugging Face's name

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of one tensor, in whatever float type it is kept; `index` has numbers for bounds."""
        ...


def read_params(source: TensorSource, config: Qwen2Config, options: ModelOptions) -> Params:
    """The parameter tree; every device's part of every parameter is read and cast by itself, and placed.

    So the host holds no second copy of the model. Raises ValueError that names every missing, extra and mis-shaped
    tensor.
    """
    abstract = abstract_params(config, options)
    check_tensors(source, config)
    if config.tie_word_embeddings and HEAD in source.shapes and not is_head_the_embedding(source):
        raise ValueError(
            f"tie_word_embeddings is true, but {source.path} holds an lm_head.weight that is not the embedding: set "
            "tie_word_embeddings to false in config.json, or leave lm_head.weight out"
        )
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _place(source, leaf_tensors(path, leaf), leaf), abstract
    )
    if broken := not_finite(params):
        raise ValueError(f"{source.path} holds NaN or infinity in {listing(broken)}; a run that diverged writes such")
    return params


def not_finite(params: Params) -> list[str]:
    """The parameters that hold a number that is none, by Hugging Face's names; stacked ones by that of layer 0."""
    flags = [(path, leaf, _is_finite(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    return [leaf_tensors(path, leaf).names[0] for path, leaf, finite in flags if not bool(finite)]


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def is_head_the_embedding(source: TensorSource) -> bool:
    """Whether the output matrix is the embedding again, perhaps rounded otherwise."""
    shape = source.shapes[HEAD]
    if source.shapes[EMBEDDING] != shape:
        return False
    rows = slice(0, min(_COMPARED_ROWS, shape[0])), slice(0, shape[1])
    a, b = (source.read(name, rows).astype(np.float32) for name in (EMBEDDING, HEAD))
    return bool(np.sum(a * b) > _SAME_MATRIX_COSINE * np.linalg.norm(a) * np.linalg.norm(b))


def check_tensors(source: TensorSource, config: Qwen2Config) -> None:
    """Refuse tensors that are not those of `config`, naming each."""
    wanted, found = expected_shapes(config), source.shapes
    known = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = [name for name in found.keys() - wanted.keys() - known if not _IGNORABLE.search(name)]
    misshapen = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not of this model": sorted(extra),
        "of another shape than the config says": misshapen,
    }
    listed = [f"{what}: {listing(names)}" for what, names in faults.items() if names]
    if listed:
        raise ValueError(f"the tensors of {source.path} do not fit its config; {'; '.join(listed)}")


def listing(names: Sequence[str]) -> str:
    """Some names for a message, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def expected_shapes(config: Qwen2Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by Hugging Face's name, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    abstract = abstract_params(config, ModelOptions(scan_layers=True))  # one layer is traced, not all
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        tensors = leaf_tensors(path, leaf)
        shapes |= dict.fromkeys(tensors.names, leaf.shape[1:] if tensors.stacked else leaf.shape)
    by_layer = sorted(shapes, key=lambda name: [int(word) if word.isdigit() else -1 for word in name.split(".")])
    return {name: shapes[name] for name in by_layer}


@dataclass(frozen=True)
class LeafTensors:
    """The tensors of one parameter: its own, or one of each layer where layers are stacked on a leading axis."""

    names: list[str]
    stacked: bool


def leaf_tensors(path: Sequence[Any], leaf: Any) -> LeafTensors:
    """What Hugging Face calls the parameter at `path` of the tree."""
    keys = [str(key.key) for key in path]
    if keys[0] == "layers" and not keys[1].isdigit():
        rest = ".".join(keys[1:])
        return LeafTensors([f"model.layers.{i}.{rest}" for i in range(leaf.shape[0])], stacked=True)
    name = ".".join(keys)
    return LeafTensors([name if keys[0] == "lm_head" else f"model.{name}"], stacked=False)


def read_blocks(source: TensorSource, name: str, index: Index) -> Iterator[np.ndarray]:
    """A slice of one tensor in blocks of rows that bound what is held at a time."""
    rows, *rest = index
    width = int(np.prod(source.shapes[name][1:], dtype=np.int64))
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for start in range(rows.start, rows.stop, step):
        yield source.read(name, (slice(start, min(start + step, rows.stop)), *rest))


def read_bytes(file: Path, offset: int, count: int) -> np.ndarray:
    """Bytes of a file. They are read, not mapped: mapped pages count as memory of this process."""
    return np.fromfile(file, np.uint8, count=count, offset=offset)


def whole(shape: Sequence[int]) -> Index:
    """The index of all of an array."""
    return tuple(slice(0, length) for length in shape)


def _place(source: TensorSource, tensors: LeafTensors, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: Index | None) -> np.ndarray:
        slices = zip(index or whole(leaf.shape), leaf.shape, strict=True)
        bounds = tuple(slice(*s.indices(length)[:2]) for s, length in slices)
        out = np.empty([s.stop - s.start for s in bounds], leaf.dtype)
        if not tensors.stacked:
            _fill(out, source, tensors.names[0], bounds)
        else:
            for layer, name in zip(out, tensors.names[bounds[0]], strict=True):
                _fill(layer, source, name, bounds[1:])
        return out

    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _fill(out: np.ndarray, source: TensorSource, name: str, index: Index) -> None:
    start = 0
    for block in read_blocks(source, name, index):
        out[start : start + len(block)] = block
        start += len(block)
