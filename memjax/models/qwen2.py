"""Qwen2, top to bottom: the modules, and the pure functions over plain parameter trees that the rest of memjax calls.

Letters: B batch, T time, D model, N query heads, K kv heads, H head size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from memjax.models import kv_cache
from memjax.models.attention import attend_cache, attend_segments
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.kv_cache import KVCache, LayerCache
from memjax.models.layers import MLP, Linear, RMSNorm, matmul, parameter
from memjax.models.rope import rope_tables, rotate
from memjax.sharding import constrain

Params = dict[str, Any]
"""Nested dicts of arrays with Hugging Face's leaf names, without the `model.` prefix."""

Rope = tuple[jax.Array, jax.Array]
# (q, k, v, cache of this layer) -> (attention output, cache of this layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
# The index of a layer in stacked weights and caches, None where they are not stacked
AttendAt = Callable[[Int[Array, ""] | None], Attend]


class SelfAttention(nnx.Module):
    """Projections and rotation around attention."""

    def __init__(self, config: Qwen2Config, options: ModelOptions, rngs: nnx.Rngs):
        d, n, k, h = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        std = config.initializer_range
        q, kv = ("q_heads", "embed"), ("kv_heads", "embed")
        self.q_proj = Linear((n * h, d), q, options, rngs, std=std, bias=True, units=(n, d))
        self.k_proj = Linear((k * h, d), kv, options, rngs, std=std, bias=True, units=(k, d))
        self.v_proj = Linear((k * h, d), kv, options, rngs, std=std, bias=True, units=(k, d))
        self.o_proj = Linear((d, n * h), q[::-1], options, rngs, std=std, units=(d, n))
        self.head_dim, self.layout = h, options.layout

    def __call__(self, x_BTD: Float[Array, "B T D"], rope: Rope, attend_: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """Attend, and put the keys and values into `cache`."""
        b, t, _ = x_BTD.shape
        q_BTNH, k_BTKH, v_BTKH = (
            constrain(project(x_BTD).reshape(b, t, -1, self.head_dim), self.layout, ("batch", "time", heads, None))
            for project, heads in ((self.q_proj, "q_heads"), (self.k_proj, "kv_heads"), (self.v_proj, "kv_heads"))
        )
        k_BKTH, v_BKTH = rotate(k_BTKH, *rope).swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        out_BTNH, cache = attend_(rotate(q_BTNH, *rope), k_BKTH, v_BKTH, cache)
        return self.o_proj(out_BTNH.reshape(b, t, -1)), cache


class DecoderLayer(nnx.Module):
    """One transformer layer."""

    def __init__(self, config: Qwen2Config, options: ModelOptions, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.self_attn = SelfAttention(config, options, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.mlp = MLP(config, options, rngs)
        self.layout = options.layout

    def __call__(self, x_BTD: Float[Array, "B T D"], rope: Rope, attend_: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """Apply the layer."""
        x_BTD = constrain(x_BTD, self.layout, ("batch", "time", None))
        with jax.named_scope("attention"):
            mixed_BTD, cache = self.self_attn(self.input_layernorm(x_BTD), rope, attend_, cache)
            x_BTD = x_BTD + mixed_BTD
        with jax.named_scope("mlp"):
            x_BTD = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD, cache


class Embedding(nnx.Module):
    """Token vectors, [V, D]."""

    def __init__(self, config: Qwen2Config, options: ModelOptions, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        weight = config.initializer_range * jax.random.normal(rngs.params(), shape, options.param_dtype)
        self.weight = parameter(weight, ("vocab", "embed"))


class Qwen2(nnx.Module):
    """The whole model; `layers` is a dict of layers, or one layer with a leading L axis when they are scanned."""

    def __init__(self, config: Qwen2Config, options: ModelOptions, rngs: nnx.Rngs):
        self.config, self.options = config, options
        self.embed_tokens = Embedding(config, options, rngs)
        if options.scan_layers:

            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stacked(rngs: nnx.Rngs) -> DecoderLayer:
                return DecoderLayer(config, options, rngs)

            self.layers: Any = stacked(rngs.split(config.num_hidden_layers))
        else:
            self.layers = nnx.Dict(
                {str(i): DecoderLayer(config, options, rngs) for i in range(config.num_hidden_layers)}
            )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        if not config.tie_word_embeddings:
            shape = (config.vocab_size, config.hidden_size)
            self.lm_head = Linear(shape, ("vocab", "embed"), options, rngs, std=config.initializer_range)

    def forward(
        self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], segment_ids_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences, causal within a segment."""

        def attend_(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            return attend_segments(q, k, v, segment_ids_BT, self.options), cache

        hidden_BTD, _ = self._layers(tokens_BT, positions_BT, lambda layer: attend_, None)
        return hidden_BTD

    def forward_cached(
        self, tokens_BT: Int[Array, "B T"], start_B: Int[Array, " B"], cache: KVCache, window: int
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states of tokens at positions start_B[b] + t, and the cache with them in it."""

        def attend_at(layer: Int[Array, ""] | None) -> Attend:
            def attend_(q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
                cache = LayerCache(
                    kv_cache.write(cache.k, k, start_B, layer), kv_cache.write(cache.v, v, start_B, layer)
                )
                seen = jax.tree.map(lambda x: x if layer is None else x[layer], cache)
                return attend_cache(q, seen.k, seen.v, start_B, window, self.options), cache

            return attend_

        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        return self._layers(tokens_BT, positions_BT, attend_at, cache)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 logits of the positions given; ids past the tokenizer's size are the caller's to mask."""
        with jax.named_scope("logits"):
            head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
            return matmul(hidden, head.weight[...])

    def _layers(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend_at: AttendAt,
        cache: KVCache | None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        with jax.named_scope("embed"):
            # A table split over its D axis, as in training, is gathered before the lookup: devices look up other rows
            # each, and the compiler would gather those, whole, on all of them.
            table_VD = constrain(self.embed_tokens.weight[...], self.options.layout, ("vocab", None))
            x_BTD = table_VD[tokens_BT].astype(self.options.compute_dtype)
        rope = rope_tables(self.config.rope, self.config.head_dim, positions_BT)

        run = self._scanned if self.options.scan_layers else self._unrolled
        x_BTD, cache = run(x_BTD, rope, attend_at, cache)
        return self.norm(x_BTD), cache

    def _scanned(self, x_BTD: jax.Array, rope: Rope, attend_at: AttendAt, cache: KVCache | None) -> tuple[Any, Any]:
        graph, stacked = nnx.split(self.layers)

        # The cache is carried whole and written in place; as the scan's input and output it would be held twice.
        def step(carry: tuple[jax.Array, Any], xs: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
            (x_BTD, cache), (weights, layer) = carry, xs
            return nnx.merge(graph, weights)(x_BTD, rope, attend_at(layer), cache), None

        if self.options.remat:
            step = jax.checkpoint(step, prevent_cse=False)
        layers = jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32)
        (x_BTD, whole), _ = jax.lax.scan(step, (x_BTD, cache and cache[0]), (stacked, layers))
        return x_BTD, cache and (whole,)

    def _unrolled(self, x_BTD: jax.Array, rope: Rope, attend_at: AttendAt, cache: KVCache | None) -> tuple[Any, Any]:
        updated = []
        for i in range(self.config.num_hidden_layers):
            graph, weights = nnx.split(self.layers[str(i)])

            def apply(weights: Any, x_BTD: jax.Array, cache: Any, graph: Any = graph) -> tuple[jax.Array, Any]:
                return nnx.merge(graph, weights)(x_BTD, rope, attend_at(None), cache)

            if self.options.remat:
                apply = jax.checkpoint(apply)
            x_BTD, layer_cache = apply(weights, x_BTD, cache and cache[i])
            updated.append(layer_cache)
        return x_BTD, cache and tuple(updated)


@lru_cache(maxsize=8)  # a second for 24 unrolled layers, and every trace of every program asks
def _abstract_state(config: Qwen2Config, options: ModelOptions) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Qwen2(config, options, nnx.Rngs(0))))


def abstract_params(config: Qwen2Config, options: ModelOptions) -> Params:
    """The parameter tree as ShapeDtypeStructs, with shardings where the options have a layout. Allocates nothing."""
    _, state = _abstract_state(config, options)

    def leaf(variable: nnx.Variable) -> jax.ShapeDtypeStruct:
        value, sharding = variable.get_value(), None
        if options.layout:
            # Stacking the layers put "layers" in front of the names; the units tell only of one layer's axes.
            units = value.shape[: value.ndim - len(variable.units)] + variable.units
            sharding = options.layout.sharding(variable.out_sharding, units)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    leaves = jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.to_pure_dict(leaves)


def init_params(config: Qwen2Config, options: ModelOptions, key: jax.Array) -> Params:
    """Random parameters, made where they will live."""

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(Qwen2(config, options, nnx.Rngs(params=key)))[1])

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config, options))
    return jax.jit(init, out_shardings=shardings)(key)


def bind(params: Params, config: Qwen2Config, options: ModelOptions) -> Qwen2:
    """The module that holds these parameters."""
    graph, _ = _abstract_state(config, options)
    return nnx.merge(graph, nnx.State(params))


def forward(
    params: Params,
    config: Qwen2Config,
    options: ModelOptions,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Final hidden states of whole sequences, causal within a segment; positions restart wherever the caller says."""
    return bind(params, config, options).forward(tokens_BT, positions_BT, segment_ids_BT)


def forward_cached(
    params: Params,
    config: Qwen2Config,
    options: ModelOptions,
    tokens_BT: Int[Array, "B T"],
    start_B: Int[Array, " B"],
    cache: KVCache,
    window: int,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states of tokens that continue what the cache holds, and the cache with them in it.

    Token t of row b sits at cache index and position start_B[b] + t and attends to cache indices up to its own, of
    which only the first `window` (static) are read. The caller sees to start + T <= window <= cache length, padding
    included, and donates the cache.
    """
    return bind(params, config, options).forward_cached(tokens_BT, start_B, cache, window)


def logits(
    params: Params, config: Qwen2Config, options: ModelOptions, hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Float32 logits, only for the hidden states given; ids past the tokenizer's size are the caller's to mask."""
    return bind(params, config, options).logits(hidden)


def stack_layers(params: Params) -> Params:
    """The scanned layout of an unrolled tree."""
    layers = params["layers"]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[str(i)] for i in range(len(layers))))
    return params | {"layers": stacked}


def unstack_layers(params: Params) -> Params:
    """The unrolled layout of a scanned tree."""
    layers = params["layers"]
    count = layers["input_layernorm"]["weight"].shape[0]
    return params | {"layers": {str(i): jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)}}
