"""Hugging Face model directories: safetensors read lazily, and written so that transformers and vLLM load them."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from memjax import __version__
from memjax.checkpoint.tensors import (
    Index,
    TensorSource,
    check_tensors,
    expected_shapes,
    leaf_tensors,
    listing,
    read_blocks,
    read_bytes,
    read_params,
    whole,
)
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_json, write_json

Progress = Callable[[int, int, str], None]
"""Called with the tensors done, their number, and the name of the next."""

log = logging.getLogger(__name__)

_DTYPES = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_TAGS = {jnp.dtype(dtype): tag for tag, dtype in _DTYPES.items()}
_INDEX = "model.safetensors.index.json"
_EXPORTED_BY = "exported_by"  # in config.json: marks a directory that an export may replace
_SHARD_BYTES = 5_000_000_000


def read_config(directory: Path) -> Qwen2Config:
    """The model that a directory's config.json describes. Raises ValueError that says what is wrong with it."""
    raw = read_json(directory / "config.json")
    if raw is None:
        held = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f"; to use {held[0]}, give the path of that file" if held else "; is it a model directory?"
        raise ValueError(f"no config.json in {directory}{hint}")
    try:
        return Qwen2Config.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def load_params(directory: Path, config: Qwen2Config, options: ModelOptions) -> Params:
    """The parameters of a directory, in `options.param_dtype`, placed by `options.layout`."""
    return read_params(SafetensorsDirectory(directory), config, options)


@dataclass(frozen=True)
class _Entry:
    file: Path
    offset: int  # bytes from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]


class SafetensorsDirectory:
    """The tensors of all safetensors files of a directory, read slice by slice."""

    def __init__(self, directory: Path):
        self.path = directory
        self._entries: dict[str, _Entry] = {}
        duplicates = []
        for file in _weight_files(directory):
            entries = _read_header(file)
            duplicates += sorted(entries.keys() & self._entries.keys())
            self._entries |= entries
        if duplicates:
            raise ValueError(f"more than one file of {directory} holds {listing(duplicates)}; keep one set of files")
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice; the rows that it lies in are read from the file."""
        entry = self._entries[name]
        rows, *rest = index
        row_bytes = int(np.prod(entry.shape[1:], dtype=np.int64)) * entry.dtype.itemsize
        held = read_bytes(entry.file, entry.offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)
        return held.view(entry.dtype).reshape(-1, *entry.shape[1:])[(slice(None), *rest)]


def _weight_files(directory: Path) -> list[Path]:
    index, single = read_json(directory / _INDEX), directory / "model.safetensors"
    if single.exists():  # as transformers does; an index beside it is left from shards that were joined
        files = [single]
        if index is not None and set(index.get("weight_map", {}).values()) != {single.name}:
            log.warning("%s is read; %s beside it is of other files, and passed over", single, _INDEX)
    elif index is not None:
        files = sorted({directory / str(name) for name in index.get("weight_map", {}).values()})
        if absent := [file.name for file in files if not file.exists()]:
            raise ValueError(f"{directory / _INDEX} names files that are not there: {listing(absent)}; download them")
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        hint = "convert its .bin files to safetensors" if any(directory.glob("*.bin")) else "download them"
        raise ValueError(f"no safetensors files in {directory}; {hint}")
    return files


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of one file: eight bytes of header length, the header as JSON, the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        head = stream.read(length) if 8 + length <= size else b""
    if size < 8 or len(head) < length:
        raise ValueError(f"{file} is truncated or no safetensors file ({size} bytes); download it again")
    try:
        header = json.loads(head)
        header.pop("__metadata__", None)
        spans = {name: _span(spec) for name, spec in header.items()}
    except _OtherDtypeError as error:
        raise ValueError(f"{file} holds {error}; take the unquantised model, or a GGUF of it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header of {file} cannot be read ({error}); download it again") from error
    end = 8 + length + max((stop for _, _, _, stop in spans.values()), default=0)
    if size < end:
        raise ValueError(f"{file} is truncated: {size} bytes of {end}; download it again")
    return {name: _Entry(file, 8 + length + start, dtype, shape) for name, (dtype, shape, start, _) in spans.items()}


class _OtherDtypeError(ValueError):
    """A whole file, but not one that can be run."""


def _span(spec: Mapping[str, Any]) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if spec["dtype"] not in _DTYPES:
        raise _OtherDtypeError(f"dtype {spec['dtype']}; memjax reads {', '.join(_DTYPES)}, not quantised weights")
    dtype, shape = jnp.dtype(_DTYPES[spec["dtype"]]), tuple(spec["shape"])
    start, stop = spec["data_offsets"]
    if stop - start != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise ValueError(f"shape {list(shape)} of {dtype} is not {stop - start} bytes")
    return dtype, shape, start, stop


class ParamsSource:
    """A parameter tree seen as Hugging Face's tensors; a slice is cut on the device and fetched."""

    def __init__(self, params: Params):
        self.path = Path("the parameters")
        self._leaves: dict[str, tuple[jax.Array, int | None]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            tensors = leaf_tensors(path, leaf)
            for layer, name in enumerate(tensors.names):
                self._leaves[name] = (leaf, layer if tensors.stacked else None)
        self.shapes = {n: x.shape if layer is None else x.shape[1:] for n, (x, layer) in self._leaves.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice on the host."""
        leaf, layer = self._leaves[name]
        return np.asarray(leaf[index] if layer is None else leaf[(layer, *index)])


def save(
    directory: Path,
    params: Params,
    config: Qwen2Config,
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> None:
    """Export parameters, unrolled or stacked, as a model directory; `dtype` is theirs unless given."""
    kept = params["embed_tokens"]["weight"].dtype
    export(directory, ParamsSource(params), config, tokenizer, dtype=dtype or kept, progress=progress)


def export(
    directory: Path,
    source: TensorSource,
    config: Qwen2Config,
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    progress: Progress | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a model directory, tensor by tensor. It appears under its name only when whole.

    A directory that is empty or that an earlier export wrote is replaced; any other is refused with ValueError.
    """
    _refuse_occupied(directory)
    check_tensors(source, config)
    dtype = jnp.dtype(dtype)
    if dtype not in _TAGS:
        raise ValueError(f"weights are written as {', '.join(str(d) for d in _TAGS)}, not as {dtype}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_weights(partial, source, expected_shapes(config), dtype, progress, shard_bytes)
        tokenizer.save(partial)
        _write_generation_config(partial, tokenizer)
        name = str(dtype)
        marks = {"dtype": name, "torch_dtype": name, _EXPORTED_BY: f"memjax {__version__}"}
        write_json(partial / "config.json", config.to_hf() | marks)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_occupied(directory: Path) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if directory.is_dir() and _EXPORTED_BY in (read_json(directory / "config.json") or {}):
        return
    raise ValueError(f"{directory} holds something that memjax did not export; give an empty or absent directory")


def _write_generation_config(directory: Path, tokenizer: Tokenizer) -> None:
    """The source's own, with its sampling defaults, or at least where generation ends."""
    own = tokenizer.source / "generation_config.json"
    if own.exists():
        shutil.copyfile(own, directory / own.name)
        return
    write_json(
        directory / "generation_config.json",
        {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id},
    )


def _write_weights(
    directory: Path,
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    progress: Progress | None,
    shard_bytes: int,
) -> None:
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
    shards = _plan_shards(sizes, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(directory / _INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    done = 0
    for file, shard in zip(names, shards, strict=True):
        with (directory / file).open("wb") as stream:
            stream.write(_header({name: shapes[name] for name in shard}, dtype))
            for name in shard:
                if progress:
                    progress(done, len(shapes), name)
                for block in read_blocks(source, name, whole(shapes[name])):
                    stream.write(np.ascontiguousarray(block.astype(dtype)).tobytes())
                done += 1
    if progress:
        progress(done, len(shapes), "")


def _plan_shards(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Tensors in order, a shard begun whenever the next would make one larger than `most_bytes`."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _TAGS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text
