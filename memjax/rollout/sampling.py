"""Drawing one token per row from logits, every row with its own settings, without ever sorting the vocabulary.

Letters: B batch (slots), V vocabulary, C blocks of the vocabulary, E entries of one block.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BLOCK = 512  # near the square root of 152K: the two short scans of a draw then cost about the same


def sample(
    logits_BV: Float[Array, "B V"],
    keys_B2: UInt32[Array, "B 2"],
    temperature_B: Float[Array, B],
    top_k_B: Int[Array, B],
    top_p_B: Float[Array, B],
    vocabulary: int,
) -> tuple[Int[Array, B], Float[Array, B]]:
    """Draw a token per row; return the tokens and their log probabilities.

    Ids from `vocabulary` on are padding rows of the embedding: never drawn, and not part of the normaliser.
    Temperature 0 is greedy. The log probability is log softmax(logits / temperature) before any cut, at temperature 1
    where greedy. `top_k` 0 and `top_p` 1 mean no cut; entries that tie with the last one kept are kept.
    """
    real_V = jnp.arange(logits_BV.shape[1]) < vocabulary
    logits_BV = jnp.where(real_V[None], logits_BV.astype(jnp.float32), -jnp.inf)
    greedy_B = temperature_B <= 0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = jax.nn.log_softmax(scaled_BV, axis=-1)

    cuts_B = ~greedy_B & ((top_k_B > 0) | (top_p_B < 1))
    allowed_BV = jax.lax.cond(
        jnp.any(cuts_B),
        lambda: jnp.where(keep_mask(scaled_BV, top_k_B, top_p_B), logprobs_BV, -jnp.inf),
        lambda: logprobs_BV,
    )
    uniform_B = jax.vmap(lambda key_2: jax.random.uniform(jax.random.wrap_key_data(key_2, impl="threefry2x32")))(
        keys_B2
    )
    drawn_B = jax.vmap(_draw)(jnp.exp(allowed_BV), uniform_B)
    tokens_B = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)
    return tokens_B, jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=1)[:, 0]


def keep_mask(logits_BV: Float[Array, "B V"], top_k_B: Int[Array, B], top_p_B: Float[Array, B]) -> Bool[Array, "B V"]:
    """Mark what top-k leaves and, of that renormalised, the fewest likeliest entries whose mass reaches top-p."""
    in_k_BV = _top_k_mask(logits_BV, top_k_B)
    probs_BV = jax.nn.softmax(jnp.where(in_k_BV, logits_BV, -jnp.inf), axis=-1)
    return in_k_BV & _top_p_mask(probs_BV, top_p_B)


def _top_k_mask(logits_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    bits_BV = jax.lax.bitcast_convert_type(logits_BV, jnp.int32)
    # Flipping the low bits of negative floats makes the integers sort as the floats do.
    order_BV = jnp.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)
    k_B = jnp.where(top_k_B > 0, top_k_B, logits_BV.shape[1])
    lowest, highest = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    threshold_B = _largest_threshold(
        lambda at_B: jnp.sum(order_BV >= at_B[:, None], axis=1, dtype=jnp.int32) >= k_B, len(k_B), lowest, highest
    )
    return order_BV >= threshold_B[:, None]


def _top_p_mask(probs_BV: jax.Array, top_p_B: jax.Array) -> jax.Array:
    order_BV = jax.lax.bitcast_convert_type(probs_BV, jnp.int32)  # floats that are not negative sort as their bits do
    threshold_B = _largest_threshold(
        lambda at_B: jnp.sum(jnp.where(order_BV >= at_B[:, None], probs_BV, 0.0), axis=1) >= top_p_B,
        len(top_p_B),
        0,
        0x40000000,  # the bits of 2.0, above every probability
    )
    return (order_BV >= threshold_B[:, None]) | (top_p_B >= 1)[:, None]


def _largest_threshold(enough: Callable[[jax.Array], jax.Array], rows: int, lowest: int, highest: int) -> jax.Array:
    """Find per row the largest integer where `enough` (true at `lowest`, false at `highest`, monotone) still holds."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)  # the mean, without overflow
        enough_B = enough(middle_B)
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    bounds = jnp.full(rows, lowest, jnp.int32), jnp.full(rows, highest, jnp.int32)
    return jax.lax.fori_loop(0, (highest - lowest).bit_length(), halve, bounds)[0]


def _draw(weights_V: jax.Array, uniform: jax.Array) -> jax.Array:
    """Invert the cumulative distribution at one uniform number: the block first, then the entry in it.

    One random number per row instead of the one per vocabulary entry that the Gumbel trick needs (100 ms for 8 rows of
    152K on a CPU).
    """
    weights_CE = jnp.pad(weights_V, (0, -len(weights_V) % BLOCK)).reshape(-1, BLOCK)
    sums_C = weights_CE.sum(axis=1)
    target = uniform * sums_C.sum()
    block, before = _locate(sums_C, target)
    entry, _ = _locate(weights_CE[block], target - before)
    return block * BLOCK + entry


def _locate(weights_X: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the first entry whose cumulative weight passes `target`, and the weight before it.

    A parallel cumulative sum rounds each of its values differently. So only entries of positive weight can be found,
    and the target is held below the largest of their sums: an entry of zero weight is never drawn.
    """
    ends_X = jnp.where(weights_X > 0, jnp.cumsum(weights_X), 0.0)
    target = jnp.clip(target, 0.0, jnp.nextafter(ends_X.max(), 0.0))
    index = jnp.argmax(ends_X > target)
    return index, ends_X[index] - weights_X[index]
