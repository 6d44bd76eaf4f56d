"""Weights in and out: Hugging Face directories both ways, GGUF files in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from memjax.checkpoint import hf
from memjax.checkpoint.gguf import GGUFModel
from memjax.checkpoint.hf import Progress, SafetensorsDirectory, read_config
from memjax.checkpoint.tensors import TensorSource, read_params
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import locate


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: pass `config` and `options` beside `params` to memjax.models.qwen2."""

    config: Qwen2Config
    options: ModelOptions
    params: Params
    tokenizer: Tokenizer
    source: Path


def load_model(name: str | Path, options: ModelOptions | None = None) -> LoadedModel:
    """Load a model directory, a .gguf file, or a Hugging Face hub id.

    `options` give the dtype, the layout on a mesh and whether layers are stacked. Raises ValueError that says what is
    wrong with the files and what to do.
    """
    options = options or ModelOptions()
    source = locate(name)
    config, tensors, tokenizer = _open(source)
    return LoadedModel(config, options, read_params(tensors, config, options), tokenizer, source)


def convert(
    name: str | Path, directory: str | Path, dtype: DTypeLike = jnp.bfloat16, progress: Progress | None = None
) -> None:
    """Write any model that `load_model` takes as a Hugging Face directory, a block of a tensor at a time.

    `directory` must be empty, absent, or an earlier export, which is replaced once the conversion is whole.
    """
    source, directory = locate(name), Path(directory)
    if directory.resolve() == source.resolve():
        raise ValueError(f"{directory} is the model that is to be converted; give another directory to write to")
    config, tensors, tokenizer = _open(source)
    hf.export(directory, tensors, config, tokenizer, dtype=dtype, progress=progress)


def _open(source: Path) -> tuple[Qwen2Config, TensorSource, Tokenizer]:
    tensors: TensorSource
    if source.is_dir():
        config, tensors = read_config(source), SafetensorsDirectory(source)
    else:
        tensors = GGUFModel(source)
        config = tensors.config
    tokenizer = Tokenizer.load(source)
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source} has {tokenizer.size} ids, but the model only {config.vocab_size}; "
            "they are not of one model"
        )
    return config, tensors, tokenizer
