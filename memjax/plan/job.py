"""What a config asks of a slice: the model's shape, and where the arrays of the learner and of an engine live on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from memjax.checkpoint.gguf import GGUFModel
from memjax.checkpoint.hf import read_config as read_model_config
from memjax.mesh import AXES, make_mesh, mesh_sizes
from memjax.models import kv_cache
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import abstract_params
from memjax.models.sizes import QWEN2_5, TOKENIZER_SIZE, published_size
from memjax.plan.hardware import Topology
from memjax.rollout.shapes import EngineConfig
from memjax.sharding import TRAIN, Layout
from memjax.tokenizer import Tokenizer
from memjax.train.config import FRESH_MODELS, TrainConfig
from memjax.train.learner import Model
from memjax.train.packing import PackingConfig
from memjax.train.step import TrainState, abstract_state


@dataclass(frozen=True)
class _Ids:
    """All of a tokenizer that shapes depend on."""

    size: int


@dataclass(frozen=True)
class Job:
    """A config on a slice. `devices` are the learner's and an engine's; without them things are counted only."""

    config: TrainConfig
    topology: Topology
    shape: Qwen2Config
    vocabulary: int  # ids of the tokenizer
    devices: tuple[Sequence[jax.Device], Sequence[jax.Device]] | None = None

    @cached_property
    def model(self) -> Model:
        """What is trained, over all devices."""
        compute = self.config.compute
        options = ModelOptions(
            compute_dtype=jnp.dtype(compute.dtype),
            scan_layers=compute.scan_layers,
            remat=compute.remat,
            layout=Layout(self._mesh(self.topology.count, compute.data, compute.fsdp, compute.tensor), TRAIN),
        )
        tokenizer: Any = _Ids(self.vocabulary)
        return Model(self.shape, options, tokenizer)

    @cached_property
    def engine(self) -> ModelOptions:
        """How a rollout engine runs: on the devices of its process, in copies that `tensor` splits."""
        count, tensor = self.topology.per_process, self.config.compute.tensor
        if count % tensor:
            raise ValueError(
                f"compute.tensor is {tensor}, but an engine has the {count} chips of one process: set it to a divisor"
            )
        return self.model.rollout_options(self._mesh(count, -1, 1, tensor, engine=True))

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on one device."""
        return self.packing.rows // self.model.row_multiple

    @cached_property
    def packing(self) -> PackingConfig:
        """The rows of a micro-batch on all devices."""
        return self.config.packing(self.model.row_multiple)

    @cached_property
    def shapes(self) -> EngineConfig:
        """The shapes of an engine's programs."""
        rollout = self.config.rollout
        return EngineConfig.for_platform(self.topology.chip.platform, rollout.max_length, rollout.slots)

    @cached_property
    def state(self) -> TrainState:
        """The learner's state, abstract."""
        return abstract_state(self.shape, self.model.options, self.config.optimizer)

    @cached_property
    def engine_params(self) -> Any:
        """The engine's weights, abstract."""
        return abstract_params(self.shape, self.engine)

    def cache(self, batch: int, length: int) -> kv_cache.KVCache:
        """A cache of the engine, abstract."""
        return kv_cache.abstract_cache(self.shape, self.engine, batch, length, self.shapes.cache_dtype)

    def _mesh(self, count: int, data: int, fsdp: int, tensor: int, *, engine: bool = False) -> Mesh:
        if self.devices is not None:
            return make_mesh(data, fsdp, tensor, devices=self.devices[engine])
        sizes = tuple(mesh_sizes(data, fsdp, tensor, count).values())
        abstract: Any = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return abstract


def model_shape(name: str) -> tuple[Qwen2Config, int]:
    """The shape of a model and the ids of its tokenizer, from its files or, for Qwen2.5's hub ids, by heart."""
    path = Path(name)
    if name in FRESH_MODELS:
        shape = Qwen2Config.from_hf(FRESH_MODELS[name].model_config())
        return shape, shape.vocab_size
    if path.is_dir():
        return read_model_config(path), Tokenizer.load(path).size
    if path.is_file():
        return GGUFModel(path).config, Tokenizer.load(path).size
    size = published_size(name)
    if size is None:
        raise ValueError(
            f"there are no files at {name!r}, and its shape is not known: give a model directory or .gguf file with "
            f"model=PATH, or one of Qwen/Qwen2.5-{{{','.join(QWEN2_5)}}}-Instruct"
        )
    return QWEN2_5[size], TOKENIZER_SIZE
