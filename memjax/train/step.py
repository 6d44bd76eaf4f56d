"""One jitted, sharded optimiser update over the micro-batches of a step, and the pass that only scores tokens.

M micro-batches, B rows of one micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params, abstract_params, forward
from memjax.sharding import Layout
from memjax.train.logprobs import LogprobOptions, token_logprobs
from memjax.train.losses import Batch
from memjax.train.optimizer import OptimizerConfig, clip_by_norm, learning_rate, make_optimizer
from memjax.train.packing import Rows

Metrics = dict[str, Array]
# (logprobs_BT, entropy_BT, micro-batch, sampled tokens of the whole step) -> (share of the loss, shares of the metrics,
# "actor/loss" among them)
TokenLoss = Callable[[Array, Array, Batch, Array], tuple[Array, Metrics]]


class TrainState(NamedTuple):
    """What an update changes. `params` are the float32 master weights."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # updates made
    skipped: Int[Array, ""]  # updates refused because loss or gradient was no number


def abstract_state(config: Qwen2Config, options: ModelOptions, optimizer: OptimizerConfig) -> TrainState:
    """The state's shapes, and its shardings where the options have a layout. Allocates nothing."""
    params = abstract_params(config, options)
    param_at = {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    whole = options.layout and options.layout.sharding((), ())

    def beside_its_param(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Dicts in the state of an optax transformation are copies of the parameter tree.
        param = param_at.get(tuple(key for key in path if isinstance(key, jax.tree_util.DictKey)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding if param else whole)

    opt_state = jax.eval_shape(make_optimizer(optimizer).init, params)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return TrainState(params, jax.tree_util.tree_map_with_path(beside_its_param, opt_state), number, number)


def init_state(params: Params, config: Qwen2Config, options: ModelOptions, optimizer: OptimizerConfig) -> TrainState:
    """A fresh state around `params`, which are taken over, not copied."""
    abstract = abstract_state(config, options, optimizer)

    def fresh() -> tuple[Any, Array, Array]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract.params)
        return make_optimizer(optimizer).init(zeros), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)

    shardings = _shardings(abstract)[1:] if options.layout else None
    return TrainState(params, *jax.jit(fresh, out_shardings=shardings)())


def restarted(state: TrainState, config: Qwen2Config, options: ModelOptions, optimizer: OptimizerConfig) -> TrainState:
    """A fresh state around the params of `state`, whose other arrays are freed first, whoever still holds them."""
    jax.tree.map(lambda leaf: leaf.delete(), state.opt_state)
    return init_state(state.params, config, options, optimizer)


def place(batch: Any, layout: Layout | None) -> Any:
    """A tree of [M, B, T] arrays on the devices, rows split as the layout says.

    Every process passes the whole batch; each keeps the rows of its devices.
    """

    def put(x_MBT: np.ndarray) -> jax.Array:
        if layout is None:
            return jnp.asarray(x_MBT)
        sharding = layout.sharding((None, "batch", "time"), x_MBT.shape)
        return jax.make_array_from_callback(x_MBT.shape, sharding, lambda index: x_MBT[index])

    return jax.tree.map(put, batch)


def gradients(
    params: Params,
    batch: Batch,
    config: Qwen2Config,
    options: ModelOptions,
    logprobs: LogprobOptions,
    token_loss: TokenLoss,
) -> tuple[Params, Metrics]:
    """Gradients and metrics of a whole step, summed over micro-batches; a metric called `..._max` takes the largest."""
    tokens = batch.rows.loss_mask.sum()
    shardings = _shardings(abstract_params(config, options)) if options.layout else None

    def loss(params: Params, micro: Batch) -> tuple[Array, Metrics]:
        return token_loss(*_score(params, config, options, logprobs, micro.rows), micro, tokens)

    def add(_: Array, micro: Batch, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
        grads, metrics = carry
        more, found = jax.grad(loss, has_aux=True)(params, micro)
        joined = {
            name: jnp.maximum(value, found[name]) if name.endswith("_max") else value + found[name]
            for name, value in metrics.items()
        }
        return _placed(jax.tree.map(jnp.add, grads, more), shardings), joined

    first = jax.tree.map(lambda x: x[0], batch)
    shapes = params, jax.eval_shape(loss, params, first)[1]
    grads, metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return _each_micro_batch(batch, batch.rows.loss_mask, add, (_placed(grads, shardings), metrics))


def make_update(
    config: Qwen2Config,
    options: ModelOptions,
    logprobs: LogprobOptions,
    optimizer: OptimizerConfig,
    token_loss: TokenLoss,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted update, for a placed batch. It takes over the state it is given.

    An update whose loss or gradient is no number changes nothing and is counted; one without a sampled token changes
    nothing. Metrics are of the whole step, whatever its cut into micro-batches.
    """
    if jnp.dtype(options.param_dtype) != jnp.float32:
        raise ValueError(
            f"param_dtype is {jnp.dtype(options.param_dtype).name}, in which small updates vanish: train with float32 "
            "parameters and choose compute_dtype freely"
        )
    shardings = _shardings(abstract_state(config, options, optimizer)) if options.layout else None
    transform, rate = make_optimizer(optimizer), learning_rate(optimizer)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        tokens = batch.rows.loss_mask.sum()
        grads, metrics = gradients(state.params, batch, config, options, logprobs, token_loss)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["actor/loss"])
        before = state.params, state.opt_state, state.step

        def updated(before: tuple[Params, optax.OptState, Array]) -> tuple[Params, optax.OptState, Array]:
            params, opt_state, step = before
            updates, opt_state = transform.update(clip_by_norm(grads, norm, optimizer.clip_norm), opt_state, params)
            return optax.apply_updates(params, updates), opt_state, step + 1

        with jax.named_scope("optimizer"):
            # A choice between old and new arrays would keep both; a branch updates in place.
            params, opt_state, step = jax.lax.cond(finite & (tokens > 0), updated, lambda before: before, before)
        skipped = state.skipped + ~finite
        metrics |= {
            "actor/grad_norm": norm,
            "actor/lr": rate(state.step),
            "training/tokens": tokens,
            "training/skipped_steps": skipped,
        }
        return TrainState(params, opt_state, step, skipped), metrics

    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def make_scorer(
    config: Qwen2Config, options: ModelOptions, logprobs: LogprobOptions
) -> Callable[[Params, Rows], Float[Array, "M B T"]]:
    """The jitted pass over placed rows that gives each sampled token its log-probability; 0 elsewhere.

    For the reference, and for the learner before its first update. The result is whole on every device.
    """

    def score(params: Params, rows: Rows) -> Float[Array, "M B T"]:
        def put(i: Array, micro: Rows, scores_MBT: Array) -> Array:
            found_BT, _ = _score(params, config, options, logprobs, micro)
            return jax.lax.dynamic_update_index_in_dim(scores_MBT, found_BT, i, 0)

        return _each_micro_batch(rows, rows.loss_mask, put, jnp.zeros(rows.tokens.shape, jnp.float32))

    return jax.jit(score, out_shardings=options.layout and options.layout.sharding((), ()))


def _score(
    params: Params, config: Qwen2Config, options: ModelOptions, logprobs: LogprobOptions, rows: Rows
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    # The cast comes before the weights are gathered from their shards, which halves what travels.
    params = jax.tree.map(lambda x: x.astype(options.compute_dtype), params)
    hidden_BTD = forward(params, config, options, rows.tokens, rows.positions, rows.segment_ids)
    head = params["embed_tokens" if config.tie_word_embeddings else "lm_head"]["weight"]
    return token_logprobs(hidden_BTD, head, rows.tokens, rows.loss_mask, logprobs)


def _each_micro_batch(batch: Any, mask_MBT: Array, body: Callable[[Array, Any, Any], Any], carry: Any) -> Any:
    """Carry a value through the micro-batches up to the last with a sampled token.

    A loop whose trip count is data: shapes stay those of the largest step, and empty micro-batches cost nothing.
    Where there is only one, no loop has to hold what is carried beside what is added to it.
    """
    if len(mask_MBT) == 1:
        return body(jnp.int32(0), jax.tree.map(lambda x: x[0], batch), carry)
    count = jnp.max(jnp.where(mask_MBT.any(axis=(1, 2)), jnp.arange(1, len(mask_MBT) + 1), 0))

    def step(i: Array, carry: Any) -> Any:
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batch)
        return body(i, micro, carry)

    return jax.lax.fori_loop(0, count, step, carry)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _placed(tree: Any, shardings: Any) -> Any:
    return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)
