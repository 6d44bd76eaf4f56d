"""The static shapes of an engine: everything it runs is padded to one of a short ladder of lengths. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_MIN_LENGTH = 16  # JetStream's smallest prefill
_BATCH_TOKENS = 512  # of a program that prefills several prompts: a tiny model's rows cost little less in a larger one


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

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The cache lengths that programs exist for: doubling from 4 smallest buckets, then by half steps too."""
        first = 4 * self.prefill_buckets[0]
        powers = [first << shift for shift in range(self.max_length.bit_length())]
        halfway = [power * 3 // 2 for power in powers if power >= 4 * first]
        return (*sorted(rung for rung in powers + halfway if rung < self.max_length), self.max_length)

    @property
    def one_window(self) -> bool:
        """Whether every decode step reads the whole cache: a window so small that a call costs more than its sums."""
        return len(self.lengths) == 1

    @cached_property
    def batches(self) -> Mapping[int, int]:
        """How many prompts are prefilled together, by the length that they are padded to.

        Only prompts within the smallest bucket are worth it: longer ones keep the device busy alone. Each length has a
        single number of rows, for with the number the last bits of a row change.
        """
        longest = self.prefill_buckets[0]
        lengths = (longest // 2, longest) if self.one_window and longest > 1 else (longest,)
        rows = {length: min(_BATCH_TOKENS // length, self.slots) for length in lengths}
        return {length: count for length, count in rows.items() if count > 1 or self.one_window}

    @property
    def work_length(self) -> int:
        """The cache in which a prompt is prefilled: the padding of its last piece may pass max_length."""
        return self.max_length + self.prefill_buckets[-1]

    @property
    def prefill_windows(self) -> tuple[int, ...]:
        """How many cache entries a piece may look at; the top one has room for the padding of a last piece."""
        return (*self.lengths[:-1], self.work_length)


@dataclass(frozen=True)
class Piece:
    """`count` tokens from position `start` on, padded to `bucket`, looking at the first `window` cache entries."""

    start: int
    count: int
    bucket: int
    window: int


def pieces(start: int, total: int, config: EngineConfig) -> Iterator[Piece]:
    """Cut positions start..total into the largest bucket, and the rest into the smallest bucket that holds it."""
    while start < total:
        bucket = next((b for b in config.prefill_buckets if b >= total - start), config.prefill_buckets[-1])
        count = min(bucket, total - start)
        yield Piece(start, count, bucket, rung(config.prefill_windows, start + bucket))
        start += count


def rung(ladder: Sequence[int], length: int) -> int:
    """The lowest rung that is not below `length`."""
    return next(rung for rung in ladder if rung >= length)
