"""The compiled programs of an engine: what each computes, for which static shapes, and where its arrays live.

Letters: B slots or rows, R rows, T query time, D model, V vocabulary, E end-of-sequence ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from memjax.models import kv_cache, qwen2
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.kv_cache import KVCache
from memjax.rollout.sampling import sample
from memjax.rollout.shapes import EngineConfig

Rows = dict[str, jax.Array]
"""What a decode state knows of each slot: an array over slots under each name in `Programs.abstract_rows`."""

State = dict[str, Any]
"""The device's half of a decode state: `cache`, a KVCache, and `rows`, Rows."""

Program = Callable[..., Any]


class Programs:
    """Compiles each program when it is first asked for, or all of them in `warm_up`, and keeps them.

    `params` are the weights' shapes and shardings, `eos_width` the most end ids of a slot. `compilations` counts the
    programs that had to be compiled after `warm_up`: more than 0, and a shape escaped the ladder.
    """

    def __init__(
        self,
        model: Qwen2Config,
        options: ModelOptions,
        config: EngineConfig,
        mesh: Mesh,
        params: Any,
        *,
        vocabulary: int,
        eos_width: int,
    ):
        self.compilations = 0
        self._model, self._options, self._config, self._params = model, options, config, params
        self._vocabulary, self._eos_width = vocabulary, eos_width
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._compiled: dict[tuple[Any, ...], Program] = {}
        self._warm = False

    def get(self, kind: str, *shape: int) -> Program:
        """The program of a kind for a shape: state, open, prefill, close, prefill_rows, insert, decode or draw."""
        key = (kind, *shape)
        if key not in self._compiled:
            self._compiled[key] = getattr(self, f"_compile_{kind}")(*shape)
            self.compilations += self._warm
        return self._compiled[key]

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program that a request can need, several at a time, reporting (done, all of them)."""
        wanted = list(self._all_programs())
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # XLA compiles outside Python's lock
        try:
            compiling = [pool.submit(self.get, *key) for key in wanted]
            for done, finished in enumerate(as_completed(compiling), start=1):
                finished.result()
                if progress:
                    progress(done, len(wanted))
        finally:  # an interruption waits for no program that is not begun
            pool.shutdown(wait=False, cancel_futures=True)
        self._warm = True

    def _all_programs(self) -> Iterator[tuple[Any, ...]]:
        yield ("state",)
        yield ("draw",)
        yield ("open", 0)
        for length in self._config.lengths:
            yield ("decode", length)
            yield ("open", length)
            yield ("close", length)
            yield ("insert", 1, length)
        for length, rows in self._config.batches.items():
            yield ("prefill_rows", rows, length)
            yield ("insert", rows, length)
        for window in self._config.prefill_windows:
            for bucket in self._config.prefill_buckets:
                if bucket <= window:
                    yield ("prefill", bucket, window)

    def _compile_state(self) -> Program:
        abstract = self._abstract_state()
        make = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)  # noqa: E731
        return jax.jit(make, out_shardings=_shardings(abstract)).lower().compile()

    def _compile_open(self, length: int) -> Program:
        work = self.abstract_cache(1, self._config.work_length)

        def open_(*prefix: KVCache) -> KVCache:
            cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), work)
            return kv_cache.put_row(cache, prefix[0], jnp.int32(0)) if prefix else cache

        arguments = [self.abstract_cache(1, length)] if length else []
        return jax.jit(open_, out_shardings=_shardings(work)).lower(*arguments).compile()

    def _compile_prefill(self, bucket: int, window: int) -> Program:
        work = self.abstract_cache(1, self._config.work_length)

        def prefill(params: qwen2.Params, cache: KVCache, ids_BT: jax.Array, start_B: jax.Array) -> KVCache:
            return qwen2.forward_cached(params, self._model, self._options, ids_BT, start_B, cache, window)[1]

        ids_BT, start_B = self._argument((1, bucket), jnp.int32), self._argument((1,), jnp.int32)
        program = jax.jit(prefill, donate_argnums=1, out_shardings=_shardings(work))
        return program.lower(self._params, work, ids_BT, start_B).compile()

    def _compile_close(self, length: int) -> Program:
        close = lambda cache: kv_cache.take_row(cache, jnp.int32(0), length)  # noqa: E731
        shardings = _shardings(self.abstract_cache(1, length))
        work = self.abstract_cache(1, self._config.work_length)
        return jax.jit(close, out_shardings=shardings).lower(work).compile()

    def _compile_prefill_rows(self, rows: int, length: int) -> Program:
        abstract = self.abstract_cache(rows, length)

        def prefill(params: qwen2.Params, ids_BT: jax.Array) -> KVCache:
            cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
            start_B = jnp.zeros(rows, jnp.int32)
            return qwen2.forward_cached(params, self._model, self._options, ids_BT, start_B, cache, length)[1]

        ids_BT = self._argument((rows, length), jnp.int32)
        return jax.jit(prefill, out_shardings=_shardings(abstract)).lower(self._params, ids_BT).compile()

    def _compile_insert(self, rows: int, length: int) -> Program:
        abstract, index_R = self._abstract_state(), self._argument((rows,), jnp.int32)
        started = {
            name: self._argument((rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in self.abstract_rows().items()
        }
        arguments = abstract, self.abstract_cache(rows, length), index_R, index_R, started
        return jax.jit(_insert, donate_argnums=0, out_shardings=_shardings(abstract)).lower(*arguments).compile()

    def _compile_decode(self, window: int) -> Program:
        cache = self.abstract_cache(self._config.slots, self._config.max_length)
        body = partial(_decode, self._model, self._options, window)
        program = jax.jit(body, donate_argnums=1, out_shardings=(self._whole, _shardings(cache)))
        return program.lower(self._params, cache, self.abstract_rows(), self._running()).compile()

    def _compile_draw(self) -> Program:
        # Apart from `decode`, so that what is costly to compile is compiled once and not for every window.
        rows = self.abstract_rows()
        logits_BV = self._argument((self._config.slots, self._model.vocab_size), jnp.float32)
        program = jax.jit(
            partial(_draw, self._vocabulary), donate_argnums=0, out_shardings=(_shardings(rows), self._whole)
        )
        return program.lower(rows, logits_BV, self._running()).compile()

    def abstract_cache(self, batch: int, length: int) -> KVCache:
        """Shapes and shardings of a cache."""
        return kv_cache.abstract_cache(self._model, self._options, batch, length, self._config.cache_dtype)

    def abstract_rows(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of the rows."""
        shapes = {
            "token": ((), jnp.int32),
            "position": ((), jnp.int32),  # of `token`, which the next step decodes
            "taken": ((), jnp.int32),
            "live": ((), jnp.bool_),
            "key": ((2,), jnp.uint32),
            "sample": ((), jnp.uint32),
            "temperature": ((), jnp.float32),
            "top_p": ((), jnp.float32),
            "top_k": ((), jnp.int32),
            "max_tokens": ((), jnp.int32),
            "eos": ((self._eos_width,), jnp.int32),
        }
        return {name: self._argument((self._config.slots, *shape), dtype) for name, (shape, dtype) in shapes.items()}

    def _abstract_state(self) -> State:
        return {
            "cache": self.abstract_cache(self._config.slots, self._config.max_length),
            "rows": self.abstract_rows(),
        }

    def _running(self) -> jax.ShapeDtypeStruct:
        return self._argument((self._config.slots,), jnp.bool_)

    def _argument(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)


def _insert(state: State, prefix: KVCache, source_R: jax.Array, slot_R: jax.Array, started: Rows) -> State:
    """Put row `source_R[i]` of a prefix into slot `slot_R[i]`; the same pair may stand there more than once."""

    def put(i: jax.Array, cache: KVCache) -> KVCache:
        row = kv_cache.take_row(prefix, source_R[i], kv_cache.cache_length(prefix))
        return kv_cache.put_row(cache, row, slot_R[i])

    rows = {name: values.at[slot_R].set(started[name]) for name, values in state["rows"].items()}
    return {"cache": jax.lax.fori_loop(0, len(slot_R), put, state["cache"]), "rows": rows}


def _decode(
    model: Qwen2Config,
    options: ModelOptions,
    window: int,
    params: qwen2.Params,
    cache: KVCache,
    rows: Rows,
    running_B: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """The logits after each slot's last token. A dead slot writes inside the window, where it does no harm."""
    start_B = jnp.where(rows["live"] & running_B, rows["position"], 0)
    hidden_BTD, cache = qwen2.forward_cached(params, model, options, rows["token"][:, None], start_B, cache, window)
    return qwen2.logits(params, model, options, hidden_BTD[:, 0]), cache


def _draw(vocabulary: int, rows: Rows, logits_BV: jax.Array, running_B: jax.Array) -> tuple[Rows, jax.Array]:
    """The rows after a token was drawn in each, and the packed results."""
    live_B = rows["live"] & running_B
    keys_B2 = jax.vmap(_step_key)(rows["key"], rows["sample"], rows["taken"])
    temperature_B = jnp.where(live_B, rows["temperature"], 0.0)  # a dead slot asks for no cuts
    token_B, logprob_B = sample(logits_BV, keys_B2, temperature_B, rows["top_k"], rows["top_p"], vocabulary)
    taken_B = rows["taken"] + live_B
    over_B = jnp.any(token_B[:, None] == rows["eos"], axis=1) | (taken_B >= rows["max_tokens"])
    rows = rows | {
        "token": jnp.where(live_B, token_B, rows["token"]),
        "position": rows["position"] + live_B,
        "taken": taken_B,
        "live": live_B & ~over_B,
    }
    logprob_bits_B = jax.lax.bitcast_convert_type(logprob_B, jnp.int32)
    return rows, jnp.stack([token_B, live_B.astype(jnp.int32), taken_B, logprob_bits_B], axis=1)


def _step_key(key_2: jax.Array, stream: jax.Array, step: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, stream), step))


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
