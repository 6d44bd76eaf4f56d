from dataclasses import replace

import numpy as np
import pytest

from memjax.train.mismatch import BFLOAT16_LIMITS, FLOAT32_LIMITS, Mismatch, measure_mismatch, mismatch_alarm

TOKENS, VOCAB = 2000, 50
LIMITS = {"float32": FLOAT32_LIMITS, "bfloat16": BFLOAT16_LIMITS}
NOISE = {"float32": 2e-6, "bfloat16": 0.01}
MASK = np.ones(TOKENS, bool)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def rollout(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, sampled tokens, and their log-probabilities as learner and sampler see them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (TOKENS, VOCAB))
    probs = np.exp(log_softmax(logits))
    tokens = np.array([rng.choice(VOCAB, p=p) for p in probs])
    learner = log_softmax(logits)[np.arange(TOKENS), tokens]
    return logits, tokens, learner, learner + rng.normal(0, NOISE[dtype], TOKENS)


def stale_weights(dtype):
    logits, tokens, learner, _ = rollout(dtype)
    moved = logits + np.random.default_rng(1).normal(0, 0.1, logits.shape)
    return log_softmax(moved)[np.arange(TOKENS), tokens], learner


def dropped_first_token(dtype):
    _, _, learner, sampled = rollout(dtype)
    return np.append(sampled[1:], 0.0), learner


def renormalised_after_top_p(dtype, top_p=0.95):
    logits, _, learner, sampled = rollout(dtype)
    probs = np.sort(np.exp(log_softmax(logits)), axis=-1)[:, ::-1]
    kept = np.where(np.cumsum(probs, -1) - probs < top_p, probs, 0)
    inside = np.exp(learner) >= np.min(np.where(kept > 0, kept, 1), axis=-1)
    renormalised = sampled - np.log(kept.sum(-1))
    return renormalised[inside], learner[inside]


def renormalised_after_a_mild_cut(dtype):
    return renormalised_after_top_p(dtype, top_p=0.98)


FAULTS = [stale_weights, dropped_first_token, renormalised_after_top_p, renormalised_after_a_mild_cut]


@pytest.mark.parametrize("dtype", LIMITS)
def test_arithmetic_noise_is_no_alarm(dtype):
    _, _, learner, sampled = rollout(dtype)
    assert mismatch_alarm(measure_mismatch(sampled, learner, MASK), LIMITS[dtype]) is None


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_trip_the_alarm(fault, dtype):
    sampled, learner = fault(dtype)
    alarm = mismatch_alarm(measure_mismatch(sampled, learner, MASK[: len(sampled)]), LIMITS[dtype])
    assert alarm is not None
    assert f"{len(sampled)} sampled tokens" in alarm


def test_statistics_are_those_worked_by_hand_over_sampled_tokens_only():
    sampled, learner = np.log([0.5, 0.25, 0.9]), np.log([0.25, 0.25, 0.1])
    found = measure_mismatch(sampled, learner, np.array([True, True, False]))
    half = np.log(2) / 2
    assert found == Mismatch(2, pytest.approx(half), pytest.approx(2 * half), pytest.approx(half), 0.125, 0.25)


def test_nothing_sampled_is_no_alarm():
    empty = measure_mismatch(np.zeros(3), np.ones(3), np.zeros(3, bool))
    assert mismatch_alarm(empty, FLOAT32_LIMITS) is None


def test_a_statistic_that_is_no_number_is_an_alarm():
    nothing = measure_mismatch(np.zeros(1), np.zeros(1), np.ones(1, bool))
    assert mismatch_alarm(replace(nothing, mean_abs=float("nan")), BFLOAT16_LIMITS) is not None
