"""Every attention body agrees with the einsum reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models.attention import attend_cache, attend_segments, choose_body
from memjax.models.config import ModelOptions

EINSUM = ModelOptions(attention="einsum")
BLOCKWISE = ModelOptions(attention="blockwise")


def random_qkv(b, t, s, n, k, h):
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, k, s, h), (b, k, s, h)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def segments(b, t, lengths):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.stack([np.resize(np.pad(ids, (0, max(0, t - len(ids)))), t)] * b), jnp.int32)


SEGMENTS = {
    "one": lambda t: np.ones(t),
    "contiguous": lambda t: np.minimum(np.arange(t) * 5 // t, 3) + 1,  # boundaries inside blocks
    "padded at the end": lambda t: np.where(np.arange(t) < t * 2 // 3, 7, 0),
    "recurring": lambda t: np.arange(t) // 50 % 2,
}


@pytest.mark.parametrize("t", [1, 7, 128, 300, 513])
@pytest.mark.parametrize("kind", SEGMENTS)
def test_blockwise_equals_einsum_in_values_and_gradients(t, kind):
    q, k, v = random_qkv(2, t, t, 6, 2, 16)
    other = np.ones(t)  # rows differ in where their segments lie
    ids_BT = jnp.asarray(np.stack([SEGMENTS[kind](t), other]), jnp.int32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def value_and_gradients(options):
        loss = lambda q, k, v: jnp.sum(weights * attend_segments(q, k, v, ids_BT, options))  # noqa: E731
        out = attend_segments(q, k, v, ids_BT, options)
        return out, *jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for expected, got in zip(value_and_gradients(EINSUM), value_and_gradients(BLOCKWISE), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
