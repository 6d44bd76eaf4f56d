"""Sampling against a float64 reference that sorts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.rollout.sampling import BLOCK, keep_mask, sample


def sorted_keep(logits_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which entries stay, by sorting in float64; ties with the last kept entry stay."""
    logits_V = logits_V.astype(np.float64)
    keep_V = np.ones(len(logits_V), bool)
    if 0 < top_k < len(logits_V):
        keep_V = logits_V >= np.sort(logits_V)[-top_k]
    if top_p < 1:
        probs_V = np.where(keep_V, np.exp(logits_V - logits_V.max()), 0)
        probs_V /= probs_V.sum()
        descending = np.sort(probs_V)[::-1]
        last = descending[np.argmax(np.cumsum(descending) >= top_p)]
        keep_V &= probs_V >= last
    return keep_V


def draw(logits_BV, *, seeds=None, temperature=1.0, top_k=0, top_p=1.0, vocabulary=None):
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    rows, width = logits_BV.shape
    seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
    keys_B2 = jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.asarray(seeds, jnp.uint32)], axis=1)
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))  # noqa: E731
    tokens_B, logprobs_B = jitted_sample(
        logits_BV,
        keys_B2,
        fill(temperature, jnp.float32),
        fill(top_k, jnp.int32),
        fill(top_p, jnp.float32),
        vocabulary or width,
    )
    return np.asarray(tokens_B), np.asarray(logprobs_B)


jitted_sample = jax.jit(sample, static_argnums=5)
jitted_mask = jax.jit(keep_mask)


@settings(max_examples=150, deadline=None)
@given(
    levels=st.lists(st.integers(-8, 8), min_size=24, max_size=24),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.013, 0.1237, 0.3331, 0.51713, 0.9011, 0.98765, 1.0]),
)
def test_cuts_equal_those_of_sorting_with_ties(levels, top_k, top_p):
    logits_V = np.asarray(levels, np.float32) * 0.37
    kept_BV = jitted_mask(logits_V[None], np.asarray([top_k], np.int32), np.asarray([top_p], np.float32))
    np.testing.assert_array_equal(kept_BV[0], sorted_keep(logits_V, top_k, top_p))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (50, 1.0), (50, 0.9), (1, 1.0), (0, 1e-6), (7, 0.5)])
def test_cuts_equal_those_of_sorting_on_a_wide_vocabulary(top_k, top_p):
    logits_BV = np.random.default_rng(1).normal(0, 3, (4, 5000)).astype(np.float32)
    kept_BV = jitted_mask(logits_BV, np.full(4, top_k, np.int32), np.full(4, top_p, np.float32))
    for kept_V, logits_V in zip(np.asarray(kept_BV), logits_BV, strict=True):
        np.testing.assert_array_equal(kept_V, sorted_keep(logits_V, top_k, top_p))


def test_every_row_follows_its_own_settings():
    logits_BV = np.random.default_rng(2).normal(0, 2, (4, 300)).astype(np.float32)
    top_k, top_p = np.asarray([0, 3, 0, 5]), np.asarray([1.0, 1.0, 0.4, 0.4])
    for seed in range(30):
        tokens_B, _ = draw(logits_BV, seeds=[seed] * 4, top_k=top_k, top_p=top_p)
        for row, token in enumerate(tokens_B):
            assert sorted_keep(logits_BV[row], top_k[row], top_p[row])[token]
            alone_B, _ = draw(logits_BV[row : row + 1], seeds=[seed], top_k=top_k[row], top_p=top_p[row])
            assert alone_B[0] == token


def test_temperature_zero_is_greedy_and_reports_temperature_one():
    logits_BV = np.random.default_rng(3).normal(0, 2, (5, 300)).astype(np.float32)
    tokens_B, logprobs_B = draw(logits_BV, temperature=0.0, top_k=2, top_p=0.5)
    np.testing.assert_array_equal(tokens_B, logits_BV.argmax(axis=1))
    np.testing.assert_allclose(logprobs_B, jax.nn.log_softmax(logits_BV)[np.arange(5), tokens_B], atol=1e-6)


def test_logprob_is_that_of_the_tempered_softmax_before_the_cuts():
    logits_BV = np.random.default_rng(4).normal(0, 2, (6, 300)).astype(np.float32)
    tokens_B, logprobs_B = draw(logits_BV, temperature=0.7, top_k=3, top_p=0.8)
    expected_BV = jax.nn.log_softmax(logits_BV / np.float32(0.7))
    np.testing.assert_allclose(logprobs_B, np.asarray(expected_BV)[np.arange(6), tokens_B], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_past_the_vocabulary_are_neither_drawn_nor_normalised_over(temperature):
    logits_BV = np.zeros((50, 40), np.float32)
    logits_BV[:, 30:] = 20.0
    tokens_B, logprobs_B = draw(logits_BV, temperature=temperature, vocabulary=30)
    assert tokens_B.max() < 30
    np.testing.assert_allclose(logprobs_B, -np.log(30), atol=1e-5)


def test_draws_follow_the_distribution_across_blocks():
    rows, width = 4000, 3 * BLOCK + 17
    probs_V = np.full(width, 1e-12)
    heavy = {5: 0.1, BLOCK - 1: 0.2, BLOCK: 0.3, 2 * BLOCK + 3: 0.15, width - 1: 0.25}
    for index, weight in heavy.items():
        probs_V[index] = weight
    tokens_B, _ = draw(np.tile(np.log(probs_V).astype(np.float32), (rows, 1)))
    for index, weight in heavy.items():
        assert abs(np.mean(tokens_B == index) - weight) < 4 * np.sqrt(weight * (1 - weight) / rows)


def test_an_entry_of_zero_probability_is_never_drawn():
    logits_BV = np.full((3000, 2 * BLOCK), -np.inf, np.float32)
    logits_BV[:, 3::7] = np.random.default_rng(5).normal(0, 1, logits_BV[:, 3::7].shape)
    tokens_B, logprobs_B = draw(logits_BV)
    assert np.all(tokens_B % 7 == 3)
    assert np.all(np.isfinite(logprobs_B))
