"""RoPE against its definition, by hand and in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models.rope import RopeConfig, attention_scale, inverse_frequencies, rope_tables, rotate

YARN = RopeConfig(1e6, "yarn", factor=4.0, original_max_position_embeddings=32_768)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    plain, stretched = (inverse_frequencies(config, 64) for config in (RopeConfig(1e6), YARN))
    # By hand: 32 turns fall on dimension 11.8, 1 turn on 19.8; so 11 and before keep, 20 and after are divided.
    np.testing.assert_allclose(stretched[:12], plain[:12], rtol=1e-6)
    np.testing.assert_allclose(stretched[20:], plain[20:] / 4, rtol=1e-6)
    ratio = plain[11:21] / stretched[11:21]
    assert np.all(np.diff(ratio) > 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_attention_factor_follows_the_config(changes, expected):
    config = RopeConfig(**({"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768} | changes))
    assert attention_scale(config) == pytest.approx(expected, rel=1e-12)


def test_angles_hold_far_past_the_trained_window():
    positions = np.asarray([[0, 1, 32_767, 131_071]])
    cos, sin = rope_tables(YARN, 64, jnp.asarray(positions, jnp.int32))
    angles = positions[..., None] * inverse_frequencies(YARN, 64).astype(np.float64)
    scale = attention_scale(YARN)
    # A float32 angle of 131071 radians is off by up to 2^-8; bfloat16 would be off by hundreds.
    np.testing.assert_allclose(cos, np.cos(angles) * scale, atol=6e-3)
    np.testing.assert_allclose(sin, np.sin(angles) * scale, atol=6e-3)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 64)), jnp.float32) for _ in range(2))

    def score(at_q, at_k):
        turn = lambda x, at: rotate(x, *rope_tables(YARN, 64, jnp.asarray([[at]], jnp.int32)))  # noqa: E731
        return float(jnp.sum(turn(q, at_q) * turn(k, at_k)))

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
