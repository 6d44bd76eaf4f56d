"""The rollout engine: Qwen2 behind JetStream's Engine calls, with programs compiled ahead and settings per slot.

Prefill only fills a cache; `generate` decodes the last prompt token again, so that sampling lives in one place and one
prefix serves any number of samples. A slot ends on the device, and its randomness is fold_in(key of its seed, step):
the same seed gives the same tokens whatever else is in the batch.

Letters: B slots or rows, R rows, T query time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from memjax.mesh import make_mesh
from memjax.models import kv_cache, qwen2
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.kv_cache import KVCache
from memjax.rollout import jetstream
from memjax.rollout.programs import Programs, State
from memjax.rollout.reply import Scores
from memjax.rollout.shapes import EngineConfig, pieces, rung
from memjax.rollout.weights import WeightStore
from memjax.sharding import ROLLOUT, Layout
from memjax.trajectory import SamplingParams

if TYPE_CHECKING:
    from memjax.rollout.scheduler import Start
    from memjax.tokenizer import Tokenizer


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

    @property
    def rows(self) -> int:
        """How many slots one call fills from it."""
        return 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length, as PrefixRows has it."""
        return (self.length,)

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """The last token, as PrefixRows has it."""
        return (self.last_token,)


@partial(jax.tree_util.register_dataclass, data_fields=["cache"], meta_fields=["lengths", "last_tokens", "version"])
@dataclass(frozen=True)
class PrefixRows:
    """As Prefix, of several prompts that were prefilled together: row i of the cache belongs to prompt i.

    It lacks the entries of the last tokens, which are decoded again in any case.
    """

    cache: KVCache
    lengths: tuple[int, ...]
    last_tokens: tuple[int, ...]
    version: int

    @property
    def rows(self) -> int:
        """How many slots one call fills from it."""
        return kv_cache.cache_rows(self.cache)


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
        self._eos_width = max(1, len(self.eos_ids))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, qwen2.abstract_params(model, self.options))
        self.weights = WeightStore(jax.device_put(params, shardings))
        self.programs = Programs(
            model,
            self.options,
            config,
            layout.mesh,
            self.weights.abstract,
            vocabulary=vocabulary,
            eos_width=self._eos_width,
        )

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
        running = self.prefill_pieces(params=params, existing_prefix=existing_prefix, tokens=tokens)
        while True:
            try:
                next(running)
            except StopIteration as done:
                return done.value

    def prefill_pieces(
        self, *, params: WeightStore, existing_prefix: Prefix | None = None, tokens: np.ndarray
    ) -> Generator[int, None, Prefix]:
        """As `prefill`, piece by piece: yields how many tokens each took, and returns the prefix."""
        return self._prefill_pieces(params, existing_prefix, tokens, None)

    def score_pieces(self, *, params: WeightStore, tokens: np.ndarray) -> Generator[int, None, tuple[Prefix, Scores]]:
        """As `prefill_pieces`, and what each token but the first was expected with."""
        packed: list[jax.Array] = []
        prefix = yield from self._prefill_pieces(params, None, tokens, packed)
        rows = np.concatenate([np.asarray(piece) for piece in packed])[: len(tokens) - 1]
        floats = np.ascontiguousarray(rows[:, :2]).view(np.float32)
        return prefix, Scores(floats[:, 0], rows[:, 2], floats[:, 1])

    def _prefill_pieces(
        self, params: WeightStore, existing_prefix: Prefix | None, tokens: np.ndarray, packed: list[jax.Array] | None
    ) -> Generator[int, None, Prefix]:
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
            cache = self.programs.get("open", existing_prefix.capacity)(existing_prefix.cache)
        else:
            cache = self.programs.get("open", 0)()
        for piece in pieces(start, total, self.config):
            ids_BT = np.zeros((1, piece.bucket), np.int32)
            ids_BT[0, : piece.count] = tokens[piece.start - start : piece.start - start + piece.count]
            start_B = np.asarray([piece.start], np.int32)
            if packed is None:
                program = self.programs.get("prefill", piece.bucket, piece.window)
                cache = program(weights.params, cache, ids_BT, start_B)
            else:
                next_BT = np.zeros_like(ids_BT)
                following = tokens[piece.start + 1 : piece.start + 1 + piece.count]
                next_BT[0, : len(following)] = following
                cache, scored = self.programs.get("score", piece.bucket)(
                    weights.params, cache, ids_BT, next_BT, start_B
                )
                packed.append(scored)
            yield piece.count
        cache = self.programs.get("close", rung(self.config.lengths, total))(cache)
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
        if sampling is None:
            sampling = SamplingParams(max_tokens=max(1, self.config.max_length - prefix.length), temperature=0.0)
        return self.insert_rows(prefix, decode_state, [(0, slot, sampling, sample)], eos=eos)

    def generate(self, params: WeightStore, decode_state: DecodeState) -> tuple[DecodeState, SampledTokens]:
        """Draw one token in every live slot."""
        positions, ends = decode_state.positions, decode_state.ends
        running_B = positions < ends
        window = rung(self.config.lengths, int(positions.max(where=running_B, initial=0)) + 1)
        cache, rows = decode_state.device["cache"], decode_state.device["rows"]
        logits_BV, cache = self.programs.get("decode", window)(params.current.params, cache, rows, running_B)
        rows, data = self.programs.get("draw")(rows, logits_BV, running_B)
        data.copy_to_host_async()
        result = SampledTokens(data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)
        return DecodeState({"cache": cache, "rows": rows}, positions + running_B, ends), result

    def load_params(self) -> WeightStore:
        """The reference through which every call reads the weights: swapping behind it reaches a running driver."""
        return self.weights

    def init_decode_state(self) -> DecodeState:
        """A state without a live slot."""
        nowhere = np.zeros(self.config.slots, np.int64)
        return DecodeState(self.programs.get("state")(), nowhere, nowhere)

    def get_prefix_destination_sharding(self) -> Any:
        """Where the leaves of a prefix live."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.programs.abstract_cache(1, self.config.max_length))

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

    @property
    def batches(self) -> Mapping[int, int]:
        """How many prompts `prefill_rows` takes, by the length that their tokens but the last are padded to."""
        return self.config.batches

    @property
    def batches_alone(self) -> bool:
        """Whether `prefill_rows` takes short prompts without company too, so that their bits are always the same."""
        return self.config.one_window

    def prefill_rows(self, *, params: WeightStore, prompts: Sequence[np.ndarray], length: int) -> PrefixRows:
        """Prefill prompts by one program, as many as `batches` has for `length`, or fewer."""
        ids_BT = np.zeros((self.config.batches[length], length), np.int32)
        for row, prompt in enumerate(prompts):
            ids_BT[row, : len(prompt) - 1] = prompt[:-1]
        weights = params.current
        cache = self.programs.get("prefill_rows", *ids_BT.shape)(weights.params, ids_BT)
        lengths, last_tokens = tuple(map(len, prompts)), tuple(int(prompt[-1]) for prompt in prompts)
        return PrefixRows(cache, lengths, last_tokens, weights.version)

    def insert_rows(
        self,
        prefix: Prefix | PrefixRows,
        decode_state: DecodeState,
        starts: Sequence[Start],
        *,
        eos: Sequence[int] | None = None,
    ) -> DecodeState:
        """Start decoding in up to `prefix.rows` slots at once, each from any row of the prefix, which stays as it is.

        `eos` stands in for the model's end ids.
        """
        for row, _, sampling, _ in starts:
            length = prefix.lengths[row]
            if (room := self.config.max_length - length) < sampling.max_tokens:
                raise ValueError(
                    f"{length} prompt tokens leave {room} of max_length {self.config.max_length}, "
                    f"{sampling.max_tokens} are asked for"
                )
        padded = [*starts, *[starts[-1]] * (prefix.rows - len(starts))]  # doing one twice changes nothing
        source_R = np.asarray([row for row, *_ in padded], np.int32)
        slot_R = np.asarray([slot for _, slot, *_ in padded], np.int32)
        started = self._started(prefix, padded, self.eos_ids if eos is None else eos)
        insert = self.programs.get("insert", prefix.rows, kv_cache.cache_length(prefix.cache))
        device = insert(decode_state.device, prefix.cache, source_R, slot_R, started)
        positions, ends = decode_state.positions.copy(), decode_state.ends.copy()
        positions[slot_R] = started["position"]
        ends[slot_R] = started["position"] + started["max_tokens"]
        return DecodeState(device, positions, ends)

    def release(self, decode_state: DecodeState, slot: int) -> DecodeState:
        """Stop a slot: from the next step on it is dead on the device too."""
        ends = decode_state.ends.copy()
        ends[slot] = 0
        return replace(decode_state, ends=ends)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program that a request can need, several at a time, reporting (done, all of them)."""
        self.programs.warm_up(progress)

    @property
    def compilations(self) -> int:
        """Programs that had to be compiled after `warm_up`: 0, unless there is a mistake."""
        return self.programs.compilations

    def _started(
        self, prefix: Prefix | PrefixRows, starts: Sequence[Start], eos: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """What `Programs.abstract_rows` names, for each start."""
        if len(eos) > self._eos_width:
            raise ValueError(f"a slot has room for {self._eos_width} end-of-sequence ids, got {len(eos)}")
        count, seeds = len(starts), [sampling.seed or 0 for _, _, sampling, _ in starts]

        def of_sampling(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(sampling, name) for _, _, sampling, _ in starts], dtype)

        return {
            "token": np.asarray([prefix.last_tokens[row] for row, *_ in starts], np.int32),
            "position": np.asarray([prefix.lengths[row] - 1 for row, *_ in starts], np.int32),
            "taken": np.zeros(count, np.int32),
            "live": np.ones(count, np.bool_),
            "key": np.asarray([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] for seed in seeds], np.uint32),
            "temperature": of_sampling("temperature", np.float32),
            "top_p": of_sampling("top_p", np.float32),
            "top_k": of_sampling("top_k", np.int32),
            "max_tokens": of_sampling("max_tokens", np.int32),
            "eos": np.asarray([[*eos, *[-1] * (self._eos_width - len(eos))]] * count, np.int32),
            "sample": np.asarray([sample for *_, sample in starts], np.uint32),
        }
