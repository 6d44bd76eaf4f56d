"""The rollout engine: Qwen2 behind JetStream's Engine calls, with programs compiled ahead and settings per slot.

Prefill only fills a cache; `generate` decodes the last prompt token again, so that sampling lives in one place and one
prefix serves any number of samples. A slot ends on the device, and its randomness is fold_in(key of its seed, step):
the same seed gives the same tokens whatever else is in the batch.

Letters: B slots, T query time, D model, V vocabulary, E end-of-sequence ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from memjax.mesh import make_mesh
from memjax.models import kv_cache, qwen2
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.kv_cache import KVCache
from memjax.rollout import jetstream
from memjax.rollout.sampling import sample
from memjax.rollout.weights import WeightStore
from memjax.sharding import ROLLOUT, Layout
from memjax.trajectory import SamplingParams

if TYPE_CHECKING:
    from memjax.tokenizer import Tokenizer

State = dict[str, Any]
"""The device's half of a decode state: `cache`, and `rows`, arrays over slots under the names in `_abstract_rows`."""

_MIN_LENGTH = 16  # JetStream's smallest prefill


@dataclass(frozen=True)
class EngineConfig:
    """The static shapes of an engine.

    `slots` sequences decode together, each of up to `max_length` tokens, prompt and completion together. A prompt is
    prefilled in pieces, each padded to one of `prefill_buckets`. `cache_dtype` None takes the model's compute dtype.
    """

    slots: int = 8
    max_length: int = 8192
    prefill_buckets: tuple[int, ...] = (64, 256, 512)
    cache_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")
        if self.max_length < _MIN_LENGTH:
            raise ValueError(f"max_length must be at least {_MIN_LENGTH}, got {self.max_length}")
        buckets = self.prefill_buckets
        if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"prefill_buckets must be positive and rising, got {buckets}")
        if buckets[-1] > self.max_length:
            raise ValueError(f"prefill_buckets {buckets} must not pass max_length {self.max_length}")

    @classmethod
    def for_platform(cls, platform: str, max_length: int, slots: int | None = None) -> EngineConfig:
        """What suits 'cpu', 'gpu' or 'tpu': on a CPU few slots and small tails, elsewhere more rows for each pass."""
        usual_slots, usual_buckets = (8, (64, 256, 512)) if platform == "cpu" else (32, (128, 512, 2048))
        buckets = tuple(bucket for bucket in usual_buckets if bucket <= max_length) or (max_length,)
        return cls(slots=slots or usual_slots, max_length=max_length, prefill_buckets=buckets)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The cache lengths that programs exist for: doubling from 4 smallest buckets, then by half steps too."""
        first = 4 * self.prefill_buckets[0]
        powers = [first << shift for shift in range(self.max_length.bit_length())]
        halfway = [power * 3 // 2 for power in powers if power >= 4 * first]
        return (*sorted(rung for rung in powers + halfway if rung < self.max_length), self.max_length)


@partial(jax.tree_util.register_dataclass, data_fields=["cache"], meta_fields=["length", "last_token", "version"])
@dataclass(frozen=True)
class Prefix:
    """The cache of `length` tokens, of batch 1 and padded to a rung of the ladder; `version` is that of the weights."""

    cache: KVCache
    length: int
    last_token: int
    version: int

    @property
    def capacity(self) -> int:
        """The cache entries that it holds in memory."""
        return kv_cache.cache_length(self.cache)


@dataclass(frozen=True)
class DecodeState:
    """The device's state, and what the host knows of it without asking.

    A slot decodes at `positions` until `ends`, unless an end-of-sequence id comes first, which only the device sees;
    `ends` 0 stops a slot.
    """

    device: State
    positions: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class SampledTokens(jetstream.ResultTokens):
    """What a step drew: columns token, validity, tokens so far, and the log probability's float32 bits."""

    def convert_to_numpy(self) -> SampledTokens:
        """Wait for the device and hold the results on the host."""
        return replace(self, data=np.asarray(self.data))  # type: ignore[call-arg]  # (flax's fields are opaque)

    @property
    def tokens(self) -> np.ndarray:
        """The token of each slot."""
        return self.data[:, 0]

    @property
    def valid(self) -> np.ndarray:
        """Whether the slot was live, and its token means anything."""
        return self.data[:, 1].astype(bool)

    @property
    def logprobs(self) -> np.ndarray:
        """The log probability of each token."""
        return np.ascontiguousarray(self.data[:, 3]).view(np.float32)


class Engine(jetstream.Engine):
    """Static slots over one model.

    One thread calls at a time, or JetStream's driver with its prefill and its generate thread. `params`, in every
    call, is the WeightStore that `load_params` returns.
    """

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(
        self,
        params: qwen2.Params,
        model: Qwen2Config,
        options: ModelOptions,
        config: EngineConfig,
        *,
        vocabulary: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
    ):
        """`vocabulary` is the number of real token ids. Without a layout in `options`, the first device is used."""
        if not 0 < vocabulary <= model.vocab_size:
            raise ValueError(f"vocabulary must be in 1..{model.vocab_size} (the model's), got {vocabulary}")
        layout = options.layout or Layout(make_mesh(devices=jax.devices()[:1]), ROLLOUT)
        self.config, self.model, self.options = config, model, replace(options, layout=layout)
        self.vocabulary, self.eos_ids = vocabulary, tuple(eos_ids)
        self._mesh, self._tokenizer = layout.mesh, tokenizer
        self._whole = NamedSharding(layout.mesh, PartitionSpec())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, qwen2.abstract_params(model, self.options))
        self.weights = WeightStore(jax.device_put(params, shardings))
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._warm = False
        self.compilations = 0
        """Programs that had to be compiled after `warm_up`: 0, or a shape escaped the ladder."""

    # -- JetStream's calls

    def prefill(
        self,
        *,
        params: WeightStore,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefix:
        """The prefix of the first `true_length` tokens, after those of `existing_prefix`, which stays as it is."""
        tokens = np.asarray(padded_tokens)[:true_length]
        if len(tokens) < true_length:
            raise ValueError(f"{true_length} tokens were announced, {len(tokens)} came")
        pieces = self.prefill_pieces(params=params, existing_prefix=existing_prefix, tokens=tokens)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                return done.value

    def prefill_pieces(
        self, *, params: WeightStore, existing_prefix: Prefix | None = None, tokens: np.ndarray
    ) -> Generator[int, None, Prefix]:
        """As `prefill`, piece by piece: yields how many tokens each took, and returns the prefix."""
        start = existing_prefix.length if existing_prefix else 0
        total = start + len(tokens)
        if not len(tokens):
            raise ValueError("there are no tokens to prefill")
        if total > self.config.max_length:
            raise ValueError(f"{total} tokens do not fit the engine's max_length {self.config.max_length}")
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.model.vocab_size - 1}, got {tokens.min()}..{tokens.max()}")
        weights = params.current
        if existing_prefix:
            cache = self._program("open", existing_prefix.capacity)(existing_prefix.cache)
        else:
            cache = self._program("open", 0)()
        for piece in _pieces(start, total, self.config):
            ids_BT = np.zeros((1, piece.bucket), np.int32)
            ids_BT[0, : piece.count] = tokens[piece.start - start : piece.start - start + piece.count]
            program = self._program("prefill", piece.bucket, piece.window)
            cache = program(weights.params, cache, ids_BT, np.asarray([piece.start], np.int32))
            yield piece.count
        cache = self._program("close", _rung(self.config.lengths, total))(cache)
        return Prefix(cache, total, int(tokens[-1]), weights.version)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        sampling: SamplingParams | None = None,
        sample: int = 0,
        eos: Sequence[int] | None = None,
    ) -> DecodeState:
        """Start decoding `prefix`, which stays as it is, in `slot`; by default greedily, as far as the slot reaches.

        `sample` picks a stream of the sampling's seed (None counts as 0); `eos` stands in for the model's end ids.
        """
        room = self.config.max_length - prefix.length
        if room < (sampling.max_tokens if sampling else 1):
            raise ValueError(
                f"{prefix.length} prompt tokens leave {room} of max_length {self.config.max_length}, "
                f"{sampling.max_tokens if sampling else 1} are asked for"
            )
        sampling = sampling or SamplingParams(max_tokens=room, temperature=0.0)
        row = self._row(prefix, sampling, sample, self.eos_ids if eos is None else eos)
        device = self._program("insert", prefix.capacity)(decode_state.device, prefix.cache, np.int32(slot), row)
        positions, ends = decode_state.positions.copy(), decode_state.ends.copy()
        positions[slot], ends[slot] = prefix.length - 1, prefix.length - 1 + sampling.max_tokens
        return DecodeState(device, positions, ends)

    def generate(self, params: WeightStore, decode_state: DecodeState) -> tuple[DecodeState, SampledTokens]:
        """Draw one token in every live slot."""
        positions, ends = decode_state.positions, decode_state.ends
        running_B = positions < ends
        window = _rung(self.config.lengths, int(positions.max(where=running_B, initial=0)) + 1)
        cache, rows = decode_state.device["cache"], decode_state.device["rows"]
        logits_BV, cache = self._program("decode", window)(params.current.params, cache, rows, running_B)
        rows, data = self._program("draw")(rows, logits_BV, running_B)
        data.copy_to_host_async()
        result = SampledTokens(data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)
        return DecodeState({"cache": cache, "rows": rows}, positions + running_B, ends), result

    def load_params(self) -> WeightStore:
        """The reference through which every call reads the weights: swapping behind it reaches a running driver."""
        return self.weights

    def init_decode_state(self) -> DecodeState:
        """A state without a live slot."""
        nowhere = np.zeros(self.config.slots, np.int64)
        return DecodeState(self._program("state")(), nowhere, nowhere)

    def get_prefix_destination_sharding(self) -> Any:
        """Where the leaves of a prefix live."""
        return jax.tree.map(lambda leaf: leaf.sharding, self._abstract_cache(1, self.config.max_length))

    def get_tokenizer(self) -> jetstream.TokenizerParameters:
        """Where the tokenizer came from."""
        return jetstream.TokenizerParameters(path=str(self._tokenizer.source) if self._tokenizer else "")

    def build_tokenizer(self, metadata: Any) -> jetstream.DriverTokenizer:
        """The tokenizer in the shape that JetStream's driver calls."""
        if self._tokenizer is None:
            raise ValueError("this engine was made without a tokenizer; give it one to run it under JetStream's driver")
        return jetstream.DriverTokenizer(self._tokenizer, self.max_prefill_length)

    @property
    def max_concurrent_decodes(self) -> int:
        """The slots."""
        return self.config.slots

    @property
    def max_prefill_length(self) -> int:
        """The longest prompt that JetStream's driver may send; called directly, the engine takes up to max_length."""
        return max(length for length in jetstream.PREFILL_LENGTHS if length <= self.config.max_length)

    @property
    def max_length(self) -> int:
        """The most tokens of a slot, prompt and completion together."""
        return self.config.max_length

    @property
    def mesh(self) -> Mesh:
        """The mesh that the engine runs on."""
        return self._mesh

    # -- beyond JetStream

    def release(self, decode_state: DecodeState, slot: int) -> DecodeState:
        """Stop a slot: from the next step on it is dead on the device too."""
        ends = decode_state.ends.copy()
        ends[slot] = 0
        return replace(decode_state, ends=ends)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program that a request can need, several at a time, reporting (done, all of them)."""
        wanted = list(self._all_programs())
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # XLA compiles outside Python's lock
            compiling = [pool.submit(self._program, *key) for key in wanted]
            for done, finished in enumerate(as_completed(compiling), start=1):
                finished.result()
                if progress:
                    progress(done, len(wanted))
        self._warm = True

    def _all_programs(self) -> Iterator[tuple[Any, ...]]:
        yield ("state",)
        yield ("draw",)
        yield ("open", 0)
        for length in self.config.lengths:
            yield ("decode", length)
            yield ("open", length)
            yield ("close", length)
            yield ("insert", length)
        for window in _prefill_windows(self.config):
            for bucket in self.config.prefill_buckets:
                if bucket <= window:
                    yield ("prefill", bucket, window)

    def _program(self, kind: str, *shape: int) -> Callable[..., Any]:
        key = (kind, *shape)
        if key not in self._programs:
            self._programs[key] = getattr(self, f"_compile_{kind}")(*shape)
            self.compilations += self._warm
        return self._programs[key]

    def _compile_state(self) -> Callable[..., Any]:
        abstract = self._abstract_state()
        make = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)  # noqa: E731
        return jax.jit(make, out_shardings=_shardings(abstract)).lower().compile()

    def _compile_open(self, length: int) -> Callable[..., Any]:
        work = self._abstract_cache(1, _work_length(self.config))

        def open_(*prefix: KVCache) -> KVCache:
            cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), work)
            return kv_cache.put_row(cache, prefix[0], jnp.int32(0)) if prefix else cache

        arguments = [self._abstract_cache(1, length)] if length else []
        return jax.jit(open_, out_shardings=_shardings(work)).lower(*arguments).compile()

    def _compile_prefill(self, bucket: int, window: int) -> Callable[..., Any]:
        work = self._abstract_cache(1, _work_length(self.config))

        def prefill(params: qwen2.Params, cache: KVCache, ids_BT: jax.Array, start_B: jax.Array) -> KVCache:
            return qwen2.forward_cached(params, self.model, self.options, ids_BT, start_B, cache, window)[1]

        ids_BT, start_B = self._argument((1, bucket), jnp.int32), self._argument((1,), jnp.int32)
        program = jax.jit(prefill, donate_argnums=1, out_shardings=_shardings(work))
        return program.lower(self.weights.abstract, work, ids_BT, start_B).compile()

    def _compile_close(self, length: int) -> Callable[..., Any]:
        close = lambda cache: kv_cache.take_row(cache, jnp.int32(0), length)  # noqa: E731
        shardings = _shardings(self._abstract_cache(1, length))
        work = self._abstract_cache(1, _work_length(self.config))
        return jax.jit(close, out_shardings=shardings).lower(work).compile()

    def _compile_insert(self, length: int) -> Callable[..., Any]:
        abstract = self._abstract_state()
        row = {name: self._argument(leaf.shape[1:], leaf.dtype) for name, leaf in self._abstract_rows().items()}
        arguments = abstract, self._abstract_cache(1, length), self._argument((), jnp.int32), row
        return jax.jit(_insert, donate_argnums=0, out_shardings=_shardings(abstract)).lower(*arguments).compile()

    def _compile_decode(self, window: int) -> Callable[..., Any]:
        cache = self._abstract_cache(self.config.slots, self.config.max_length)
        body = partial(_decode, self.model, self.options, window)
        program = jax.jit(body, donate_argnums=1, out_shardings=(self._whole, _shardings(cache)))
        return program.lower(self.weights.abstract, cache, self._abstract_rows(), self._running()).compile()

    def _compile_draw(self) -> Callable[..., Any]:
        # Apart from `decode`, so that what is costly to compile is compiled once and not for every window.
        rows = self._abstract_rows()
        logits_BV = self._argument((self.config.slots, self.model.vocab_size), jnp.float32)
        program = jax.jit(
            partial(_draw, self.vocabulary), donate_argnums=0, out_shardings=(_shardings(rows), self._whole)
        )
        return program.lower(rows, logits_BV, self._running()).compile()

    def _running(self) -> jax.ShapeDtypeStruct:
        return self._argument((self.config.slots,), jnp.bool_)

    def _abstract_cache(self, batch: int, length: int) -> KVCache:
        return kv_cache.abstract_cache(self.model, self.options, batch, length, self.config.cache_dtype)

    def _abstract_rows(self) -> dict[str, jax.ShapeDtypeStruct]:
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
            "eos": ((max(1, len(self.eos_ids)),), jnp.int32),
        }
        return {name: self._argument((self.config.slots, *shape), dtype) for name, (shape, dtype) in shapes.items()}

    def _abstract_state(self) -> State:
        return {
            "cache": self._abstract_cache(self.config.slots, self.config.max_length),
            "rows": self._abstract_rows(),
        }

    def _argument(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _row(self, prefix: Prefix, sampling: SamplingParams, sample: int, eos: Sequence[int]) -> dict[str, Any]:
        seed = sampling.seed or 0
        width = max(1, len(self.eos_ids))
        if len(eos) > width:
            raise ValueError(f"a slot has room for {width} end-of-sequence ids, got {len(eos)}")
        return {
            "token": np.int32(prefix.last_token),
            "position": np.int32(prefix.length - 1),
            "taken": np.int32(0),
            "live": np.bool_(True),
            "key": np.asarray([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
            "temperature": np.float32(sampling.temperature),
            "top_p": np.float32(sampling.top_p),
            "top_k": np.int32(sampling.top_k),
            "max_tokens": np.int32(sampling.max_tokens),
            "eos": np.asarray([*eos, *[-1] * (width - len(eos))], np.int32),
            "sample": np.uint32(sample),
        }


def _insert(state: State, prefix: KVCache, slot: jax.Array, row: dict[str, jax.Array]) -> State:
    rows = {name: values.at[slot].set(row[name]) for name, values in state["rows"].items()}
    return {"cache": kv_cache.put_row(state["cache"], prefix, slot), "rows": rows}


def _decode(
    model: Qwen2Config,
    options: ModelOptions,
    window: int,
    params: qwen2.Params,
    cache: KVCache,
    rows: dict[str, jax.Array],
    running_B: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """The logits after each slot's last token. A dead slot writes inside the window, where it does no harm."""
    start_B = jnp.where(rows["live"] & running_B, rows["position"], 0)
    hidden_BTD, cache = qwen2.forward_cached(params, model, options, rows["token"][:, None], start_B, cache, window)
    return qwen2.logits(params, model, options, hidden_BTD[:, 0]), cache


def _draw(
    vocabulary: int, rows: dict[str, jax.Array], logits_BV: jax.Array, running_B: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
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


def _step_key(key_2: jax.Array, sample: jax.Array, step: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, sample), step))


@dataclass(frozen=True)
class _Piece:
    start: int
    count: int
    bucket: int
    window: int


def _pieces(start: int, total: int, config: EngineConfig) -> Iterator[_Piece]:
    """Cut positions start..total into the largest bucket, and the rest into the smallest bucket that holds it."""
    windows = _prefill_windows(config)
    while start < total:
        bucket = next((b for b in config.prefill_buckets if b >= total - start), config.prefill_buckets[-1])
        count = min(bucket, total - start)
        yield _Piece(start, count, bucket, _rung(windows, start + bucket))
        start += count


def _prefill_windows(config: EngineConfig) -> tuple[int, ...]:
    """The ladder of windows for prefill: the top one has room for the padding of a last piece."""
    return (*config.lengths[:-1], _work_length(config))


def _work_length(config: EngineConfig) -> int:
    return config.max_length + config.prefill_buckets[-1]


def _rung(ladder: Sequence[int], length: int) -> int:
    return next(rung for rung in ladder if rung >= length)


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
