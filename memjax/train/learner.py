"""From a config to what a run needs: the model, the update, and weights for the engine that samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from memjax.checkpoint import LoadedModel, load_model
from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params, abstract_params, init_params
from memjax.rollout.engine import EngineConfig
from memjax.rollout.local import LocalClient
from memjax.sharding import ROLLOUT, TRAIN, Layout
from memjax.tokenizer import Tokenizer
from memjax.train.batches import make_batches
from memjax.train.config import FRESH_MODELS, TrainConfig
from memjax.train.logprobs import LogprobOptions, positions_at_once
from memjax.train.losses import Batch, objective_loss
from memjax.train.mismatch import BFLOAT16_LIMITS, FLOAT32_LIMITS, MismatchLimits, measure_mismatch, mismatch_alarm
from memjax.train.optimizer import OptimizerConfig
from memjax.train.packing import PackedStep, PackingConfig, Rows, pack
from memjax.train.presets import ObjectiveConfig
from memjax.train.sft import supervised_loss
from memjax.train.step import TrainState, make_scorer, make_update, place
from memjax.train.team import by_the_first, is_first
from memjax.train.turns import EngineInTurn, in_turn
from memjax.trajectory import Trajectory

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]

_EMBEDDING_STD = 0.2
_RESIDUAL_SCALE = 0.1


@dataclass(frozen=True)
class Model:
    """What is trained, apart from its weights."""

    config: Qwen2Config
    options: ModelOptions
    tokenizer: Tokenizer

    @property
    def layout(self) -> Layout:
        """Where the weights that are trained live."""
        assert self.options.layout is not None
        return self.options.layout

    @property
    def row_multiple(self) -> int:
        """Devices that rows are split over."""
        return self.layout.mesh.shape["data"] * self.layout.mesh.shape["fsdp"]

    def logprob_options(self, temperature: float = 1.0) -> LogprobOptions:
        """The distribution over the tokenizer's ids."""
        return LogprobOptions(self.tokenizer.size, temperature, positions_at_once(self.options.platform))

    def rollout_options(self, mesh: Mesh) -> ModelOptions:
        """How it runs to sample on a mesh: with weights in the compute dtype that only `tensor` splits."""
        dtype = self.options.compute_dtype
        return ModelOptions(
            param_dtype=dtype, compute_dtype=dtype, scan_layers=self.options.scan_layers, layout=Layout(mesh, ROLLOUT)
        )


def open_model(config: TrainConfig) -> tuple[Model, Params]:
    """The model to start from, in float32, on the mesh of the config."""
    compute = config.compute
    sizes = {"data": compute.data, "fsdp": compute.fsdp, "tensor": compute.tensor}
    # Without a -1 the mesh takes as many devices as it names, from the first on.
    count = None if -1 in sizes.values() else int(np.prod(list(sizes.values())))
    mesh = make_mesh(**sizes, devices=jax.devices()[:count])
    own_part(mesh)
    options = ModelOptions(
        compute_dtype=jnp.dtype(compute.dtype),
        scan_layers=compute.scan_layers,
        remat=compute.remat,
        layout=Layout(mesh, TRAIN),
    )
    loaded = _fresh(config, options) if config.model in FRESH_MODELS else load_model(config.model, options)
    return Model(loaded.config, options, loaded.tokenizer), loaded.params


def own_part(mesh: Mesh) -> Mesh:
    """The devices of a mesh that are this process's, for an engine of its own: so many copies times `tensor`.

    ValueError where they are none, or where a copy of the weights lies on several processes.
    """
    copies = mesh.devices.reshape(-1, mesh.shape["tensor"])
    is_own = np.vectorize(lambda device: device.process_index == jax.process_index())(copies)
    own = copies[is_own.all(axis=1)]
    if own.size < is_own.sum() or not own.size:
        raise ValueError(
            f"compute spreads {dict(mesh.shape)} over {jax.process_count()} processes so that process "
            f"{jax.process_index()} has no whole copy of the weights to sample with: set tensor to a divisor of the "
            "devices of a process, and data or fsdp to -1"
        )
    return make_mesh(data=len(own), tensor=own.shape[1], devices=list(own.flat))


def make_client(config: TrainConfig, model: Model, weights: Params, turn: threading.Lock) -> LocalClient:
    """The engine that samples on the devices of this process, with weights that `rollout_weights` made.

    It starts its programs in turn with the learner's.
    """
    mesh = own_part(model.layout.mesh)
    platform = mesh.devices.flat[0].platform
    engine = EngineInTurn(
        on_own_part(model, weights),
        model.config,
        model.rollout_options(mesh),
        EngineConfig.for_platform(platform, config.rollout.max_length, config.rollout.slots),
        vocabulary=model.tokenizer.size,
        eos_ids=model.tokenizer.eos_ids,
        tokenizer=model.tokenizer,
        turn=turn,
    )
    return LocalClient(engine, model.tokenizer, model=config.model, prefix_capacity=config.rollout.prefix_tokens)


def rollout_weights(model: Model) -> Callable[[Params], Params]:
    """The jitted function from weights in training to those that sample: cast, gathered, and no longer the same."""
    options = model.rollout_options(model.layout.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model.config, options))

    # A copy even where nothing changes, for the update takes over the arrays that it is given.
    def weights(params: Params) -> Params:
        return jax.tree.map(lambda leaf: jnp.copy(leaf.astype(options.param_dtype)), params)

    return jax.jit(weights, out_shardings=shardings)


def on_own_part(model: Model, weights: Params) -> Params:
    """What `rollout_weights` made, as arrays of this process's devices alone; they share their memory."""
    abstract = abstract_params(model.config, model.rollout_options(own_part(model.layout.mesh)))

    def own(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, wanted.sharding, parts)

    return jax.tree.map(own, weights, abstract)


def on_host(params: Params) -> Params:
    """Weights that the first process can write to files; every process has to call."""
    if jax.process_count() == 1:
        return params

    def fetched(leaf: jax.Array) -> np.ndarray:
        whole = process_allgather(leaf, tiled=True)
        return whole if is_first() else np.zeros(0, leaf.dtype)

    return jax.tree.map(fetched, params)


def frozen_copy(model: Model, params: Params) -> Params:
    """The reference: weights in the compute dtype, laid out as they are trained."""
    dtype, shardings = model.options.compute_dtype, jax.tree.map(lambda leaf: leaf.sharding, params)
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), tree), out_shardings=shardings)
    return copy(params)


def make_supervised_update(model: Model, optimizer: OptimizerConfig) -> Update:
    """The update of a supervised stage."""
    return make_update(model.config, model.options, model.logprob_options(), optimizer, supervised_loss)


@dataclass(frozen=True)
class Learner:
    """Rollout batches to updates. `reference` holds the frozen weights that the divergence is from, where it counts."""

    objective: ObjectiveConfig
    packing: PackingConfig
    groups: int  # of a full batch, which gives `packing.optimizer_steps` updates
    layout: Layout
    limits: MismatchLimits
    update: Update
    score: Callable[[Params, Rows], jax.Array]
    reference: Params | None

    def learn(self, state: TrainState, trajectories: Sequence[Trajectory]) -> tuple[TrainState, dict[str, float]]:
        """The state after the updates of a rollout batch, and their metrics. `state` is taken over.

        Nothing changes where there is nothing to learn: no trajectory, or no advantage and no other term.
        """
        started = time.perf_counter()
        steps = self._pack(trajectories)
        batches = make_batches(
            steps,
            trajectories,
            self.objective,
            learner_logprobs=self._score_all(state.params, steps) if self.objective.old_logprobs == "learner" else None,
            ref_logprobs=None if self.reference is None else self._score_all(self.reference, steps),
        )
        found = []
        for batch in batches:
            if batch.advantages.any() or self.objective.kl_coef or self.objective.entropy_coef:
                state, metrics = self.update(state, place(batch, self.layout))
                found.append(jax.device_get(metrics))
        return state, {**_of_all(found), "timing_s/update_actor": time.perf_counter() - started}

    def compare(self, weights: Params, trajectories: Sequence[Trajectory]) -> tuple[dict[str, float], str | None]:
        """How far sampler and learner are apart with the very weights that sampled, and the alarm if it is too far.

        The tokens of one update tell.
        """
        step = self._pack(trajectories)[0]
        (scored,) = self._score_all(weights, [step])
        mismatch = measure_mismatch(step.rollout_logprobs, scored, step.rows.loss_mask)
        return mismatch.metrics(), mismatch_alarm(mismatch, self.limits)

    def _pack(self, trajectories: Sequence[Trajectory]) -> list[PackedStep]:
        groups = len({trajectory.group_id for trajectory in trajectories})
        if not groups:
            return []
        # In proportion: an update of a batch that could not be filled weighs as much as one of a full batch.
        updates = max(1, round(groups * self.packing.optimizer_steps / self.groups))
        packing = replace(self.packing, optimizer_steps=updates)
        return pack(trajectories, packing, mask_truncated=self.objective.mask_truncated)

    def _score_all(self, params: Params, steps: Sequence[PackedStep]) -> list[np.ndarray]:
        return [np.asarray(self.score(params, place(step.rows, self.layout))) for step in steps]


def _of_all(updates: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """The metrics of several updates as one: means, but the largest maximum and the last count."""
    joined = {}
    for name in updates[0] if updates else ():
        values = [float(metrics[name]) for metrics in updates]
        is_count = name == "training/skipped_steps"
        joined[name] = values[-1] if is_count else max(values) if name.endswith("_max") else float(np.mean(values))
    return joined


def make_learner(config: TrainConfig, model: Model, reference: Params | None, turn: threading.Lock) -> Learner:
    """The learner of the config, which starts its programs in turn with the engine's."""
    logprobs = model.logprob_options(config.rollout.temperature)

    def token_loss(*arguments: Any) -> Any:
        return objective_loss(config.objective, *arguments)

    return Learner(
        objective=config.objective,
        packing=config.packing(model.row_multiple),
        groups=config.rollout.groups,
        layout=model.layout,
        limits=FLOAT32_LIMITS if config.compute.dtype == "float32" else BFLOAT16_LIMITS,
        update=in_turn(make_update(model.config, model.options, logprobs, config.optimizer, token_loss), turn),
        score=in_turn(make_scorer(model.config, model.options, logprobs), turn),
        reference=reference,
    )


def _fresh(config: TrainConfig, options: ModelOptions) -> LoadedModel:
    """A random model for a tiny task. Its files are written beside the run, where the export finds the tokenizer."""
    source, learns = config.out / config.model, FRESH_MODELS[config.model]
    by_the_first(lambda: learns.write_tokenizer(source))
    shape = Qwen2Config.from_hf(learns.model_config())
    params = calm(init_params(shape, options, jax.random.key(config.seed)), shape)
    return LoadedModel(shape, options, params, Tokenizer.load(source), source)


def calm(params: Params, config: Qwen2Config) -> Params:
    """Random weights whose layers begin close to the identity.

    With residual projections of the usual size the step from a key to its value did not form in a small model.
    """

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [str(key.key) for key in path]
        if "o_proj" in names or "down_proj" in names:
            return leaf * _RESIDUAL_SCALE
        return leaf * (_EMBEDDING_STD / config.initializer_range) if "embed_tokens" in names else leaf

    return jax.tree_util.tree_map_with_path(scaled, params)
