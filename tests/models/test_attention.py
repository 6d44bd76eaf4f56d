"""Every attention body agrees with the einsum reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mesh import make_mesh
from memjax.models.attention import attend_cache, attend_segments, choose_body
from memjax.models.config import ModelOptions
from memjax.sharding import TRAIN, Layout

EINSUM = ModelOptions(attention="einsum")
BLOCKWISE = ModelOptions(attention="blockwise")


def random_qkv(b, t, s, n, k, h):
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, k, s, h), (b, k, s, h)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


SEGMENTS = {
    "one": lambda t: np.ones(t),
    "contiguous": lambda t: np.minimum(np.arange(t) * 5 // t, 3) + 1,  # boundaries inside blocks
    "padded at the end": lambda t: np.where(np.arange(t) < t * 2 // 3, 7, 0),
    "recurring": lambda t: np.arange(t) // 140 % 2,  # the third stretch has the id of the first
}


@pytest.mark.parametrize(
    ("t", "kind"), [(1, "one"), (7, "contiguous"), (128, "one"), *((300, kind) for kind in SEGMENTS)]
)
def test_blockwise_equals_einsum_in_values_and_gradients(t, kind):
    q, k, v = random_qkv(2, t, t, 6, 2, 16)
    other = np.ones(t)  # rows differ in where their segments lie
    ids_BT = jnp.asarray(np.stack([SEGMENTS[kind](t), other]), jnp.int32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradients(options, q, k, v):
        out, pull = jax.vjp(lambda q, k, v: attend_segments(q, k, v, ids_BT, options), q, k, v)
        return out, *pull(weights)

    for expected, got in zip(
        value_and_gradients(EINSUM, q, k, v), value_and_gradients(BLOCKWISE, q, k, v), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("t", "s", "window"), [(1, 700, 600), (1, 40, 40), (200, 700, 600), (64, 64, 64), (5, 300, 129)]
)
def test_blockwise_cache_reads_equal_einsum(t, s, window):
    q, k, v = random_qkv(3, t, s, 6, 2, 16)
    start_B = jnp.asarray([0, (window - t) // 2, window - t], jnp.int32)
    k, v = (x.at[:, :, window:].set(1e4) for x in (k, v))  # what lies past the window must count for nothing
    read = jax.jit(attend_cache, static_argnums=(4, 5))
    expected, got = (read(q, k, v, start_B, window, options) for options in (EINSUM, BLOCKWISE))
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def test_blocks_of_other_segments_are_skipped():
    """Keys of a segment that no query of the block shares may hold anything, NaN included: they are never read."""
    q, k, v = random_qkv(1, 512, 512, 2, 1, 16)
    ids_BT = jnp.asarray(np.arange(512)[None] // 256, jnp.int32)
    k, v = (x.at[:, :, :256].set(jnp.nan) for x in (k, v))
    out = jax.jit(attend_segments, static_argnums=4)(q, k, v, ids_BT, BLOCKWISE)
    assert np.all(np.isfinite(out[:, 256:]))


def test_training_on_8k_tokens_needs_little_memory():
    t, n, k, h = 8192, 14, 2, 64  # a layer of the 0.5B
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, t, n, h), (1, k, t, h), (1, k, t, h))]
    ids_BT = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def temporary_bytes(options):
        loss = lambda q, k, v, ids: attend_segments(q, k, v, ids, options).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, ids_BT).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(BLOCKWISE) < 200e6
    assert temporary_bytes(EINSUM) > 5e9  # so the figure does count the scores


@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    [(None, 2), ((2, 1, 4), 4), ((1, 1, 8), 2)],  # one device; kv heads split; kv heads replicated
)
def test_splash_lowers_for_tpu(sizes, kv_heads):
    layout = sizes and Layout(make_mesh(*sizes), TRAIN)
    options = ModelOptions(jnp.bfloat16, jnp.bfloat16, attention="splash", layout=layout)
    q, k = ((2, 256, 16, 128), (2, kv_heads, 256, 128))
    q, k, longer = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (q, k, (2, kv_heads, 512, 128)))
    ids_BT, start_B = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((2, 256), (2,)))

    def loss(q, k, v, ids):
        return attend_segments(q, k, v, ids, options).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, ids_BT).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
    read = jax.jit(lambda q, k, v, start: attend_cache(q, k, v, start, 512, options))
    assert "tpu_custom_call" in read.trace(q, longer, longer, start_B).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("platform", "query_length", "key_length", "expected"),
    [
        ("cpu", 1, 512, "blockwise"),
        ("cpu", 512, 512, "blockwise"),
        ("tpu", 1, 512, "einsum"),
        ("tpu", 256, 512, "splash"),
        ("tpu", 100, 512, "blockwise"),
        ("gpu", 1, 512, "einsum"),
        ("gpu", 100, 512, "cudnn"),
    ],
)
def test_the_body_follows_platform_and_shape(monkeypatch, platform, query_length, key_length, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    options = ModelOptions(jnp.bfloat16, jnp.bfloat16)
    assert choose_body(options, query_length, key_length, 128) == expected
    assert choose_body(ModelOptions(attention="einsum"), query_length, key_length, 128) == "einsum"
