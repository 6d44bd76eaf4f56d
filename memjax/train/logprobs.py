"""Log-probabilities and entropies of sampled tokens from hidden states, a few positions at a time.

B rows, T time, C positions of one chunk, D model, V vocabulary. Logits exist for one chunk only, in the forward and in
the backward pass, and only where a token was sampled: prompts, most of what a memory agent reads, are never projected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.models.layers import matmul

# Finite, so that its product with a probability of 0 is 0.
_NEVER = -1e30


@dataclass(frozen=True)
class LogprobOptions:
    """The distribution that tokens were drawn from, and how much of it to hold at a time.

    Ids from `vocab_size` on (rows of the projection that the tokenizer has no token for) are never drawn. `temperature`
    is the one that the rollout sampled with. `chunk` positions of every row are projected at once.
    """

    vocab_size: int
    temperature: float = 1.0
    chunk: int = 256

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0 to learn from samples, got {self.temperature}")
        if self.vocab_size < 1 or self.chunk < 1:
            raise ValueError(f"vocab_size and chunk must be positive, got {self.vocab_size} and {self.chunk}")


def positions_at_once(platform: str) -> int:
    """The chunk for a platform: a CPU feels the positions that nothing was sampled in, others want large products."""
    return 128 if platform == "cpu" else 256


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    options: LogprobOptions,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each masked token given the hidden state before it, and the entropy it was drawn from; else 0.

    Both stand at the token's own place, in nats, float32. The mask of a row's first token, which has nothing before it,
    is ignored.
    """
    length = tokens_BT.shape[1]
    wanted_BT = jnp.roll(mask_BT, -1, axis=1).at[:, -1].set(False)
    chunk = min(options.chunk, length)
    pad = -length % chunk
    chunks = -(-wanted_BT.sum(axis=1).max() // chunk)
    order_BT, place_BT = _sampled_first(wanted_BT)
    hidden_BTD = jnp.pad(jnp.take_along_axis(hidden_BTD, order_BT[:, :, None], axis=1), ((0, 0), (0, pad), (0, 0)))
    targets_BT = jnp.pad(jnp.take_along_axis(jnp.roll(tokens_BT, -1, axis=1), order_BT, axis=1), ((0, 0), (0, pad)))

    with jax.named_scope("logprobs"):
        ordered = _in_chunks(options, chunk, hidden_BTD, head_VD, targets_BT, chunks)

    def at_their_tokens(ordered_BT: Array) -> Array:
        values_BT = jnp.where(wanted_BT, jnp.take_along_axis(ordered_BT, place_BT, axis=1), 0.0)
        return jnp.roll(values_BT, 1, axis=1)

    return at_their_tokens(ordered[0]), at_their_tokens(ordered[1])


def _sampled_first(wanted_BT: Array) -> tuple[Array, Array]:
    """The order that puts the wanted positions first, and its inverse. Behind the fullest row nothing is left to do."""
    wanted_count_BT, other_count_BT = jnp.cumsum(wanted_BT, axis=1), jnp.cumsum(~wanted_BT, axis=1)
    place_BT = jnp.where(wanted_BT, wanted_count_BT, wanted_count_BT[:, -1:] + other_count_BT) - 1
    rows, length = wanted_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return jnp.zeros_like(place_BT).at[jnp.arange(rows)[:, None], place_BT].set(position_BT), place_BT


def _logits(options: LogprobOptions, hidden_BCD: Array, head_VD: Array) -> Float[Array, "B C V"]:
    logits_BCV = matmul(hidden_BCD, head_VD) / options.temperature
    return jnp.where(_ids(logits_BCV) < options.vocab_size, logits_BCV, _NEVER)


def _ids(x_BCV: Array) -> Int[Array, "B C V"]:
    return jax.lax.broadcasted_iota(jnp.int32, x_BCV.shape, 2)


def _in_chunks_forward(
    options: LogprobOptions, chunk: int, hidden_BTD: Array, head_VD: Array, targets_BT: Array, chunks: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    def step(i: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden_BCD, targets_BC = (_slice(x, i, chunk) for x in (hidden_BTD, targets_BT))
        logits_BCV = _logits(options, hidden_BCD, head_VD)
        total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A masked sum, not a gather: it stays local where the vocabulary is split over devices.
        chosen_BC = jnp.sum(jnp.where(_ids(logits_BCV) == targets_BC[:, :, None], logits_BCV, 0.0), axis=-1)
        probs_BCV = jnp.exp(logits_BCV - total_BC[:, :, None])
        # As a product of vectors, because XLA's CPU backend takes four times as long for the sum of their product.
        mean_BC = jnp.einsum("bcv,bcv->bc", probs_BCV, logits_BCV, precision="highest")
        found = chosen_BC - total_BC, total_BC - mean_BC, total_BC
        return tuple(_put(x_BT, part_BC, i, chunk) for x_BT, part_BC in zip(done, found, strict=True))

    zeros_BT = jnp.zeros(targets_BT.shape, jnp.float32)
    logprobs_BT, entropy_BT, total_BT = jax.lax.fori_loop(0, chunks, step, (zeros_BT, zeros_BT, zeros_BT))
    return (logprobs_BT, entropy_BT), (hidden_BTD, head_VD, targets_BT, chunks, entropy_BT, total_BT)


# By hand, because a loop with a trip count known only at run time has no derivative of its own.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(
    options: LogprobOptions, chunk: int, hidden_BTD: Array, head_VD: Array, targets_BT: Array, chunks: Array
) -> tuple[Array, Array]:
    return _in_chunks_forward(options, chunk, hidden_BTD, head_VD, targets_BT, chunks)[0]


def _in_chunks_backward(
    options: LogprobOptions, chunk: int, saved: tuple[Array, ...], upstream: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    hidden_BTD, head_VD, targets_BT, chunks, *sums_BT = saved

    def step(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_BCD, targets_BC = (_slice(x, i, chunk) for x in (hidden_BTD, targets_BT))
        numbers_BC = (_slice(x, i, chunk) for x in (*upstream, *sums_BT))
        dlogprob, dentropy, entropy, total = (x_BC[:, :, None] for x_BC in numbers_BC)
        logits_BCV, pull = jax.vjp(partial(_logits, options), hidden_BCD, head_VD)
        # By logits, log p[chosen] has the gradient [chosen] - p, and the entropy H has -p (log p + H).
        logprobs_BCV = logits_BCV - total
        taken_BCV = jnp.exp(logprobs_BCV) * (dlogprob + dentropy * (logprobs_BCV + entropy))
        chosen_BCV = jnp.where(_ids(logits_BCV) == targets_BC[:, :, None], dlogprob, 0.0)
        hidden_grad_BCD, head_grad_VD = pull(chosen_BCV - taken_BCV)
        return _put(grads[0], hidden_grad_BCD, i, chunk), grads[1] + head_grad_VD.astype(jnp.float32)

    # A bfloat16 sum over chunks would lose the small terms.
    zeros = jnp.zeros_like(hidden_BTD), jnp.zeros(head_VD.shape, jnp.float32)
    hidden_grad_BTD, head_grad_VD = jax.lax.fori_loop(0, chunks, step, zeros)
    return hidden_grad_BTD, head_grad_VD.astype(head_VD.dtype), None, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _slice(x: Array, i: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1)


def _put(x: Array, part: Array, i: Array, chunk: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * chunk, axis=1)
