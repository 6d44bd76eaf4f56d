from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.train.losses import Batch, conversation_mean, kl_estimate, log_ratio, objective_loss, policy_loss
from memjax.train.packing import Rows
from memjax.train.presets import PRESETS, ObjectiveConfig

CLIPS = ObjectiveConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
# ratio, advantage -> loss, clipped, dual clip
POLICY_TABLE = [
    (1.0, 1.0, -1.0, False, False),
    (1.5, 1.0, -1.28, True, False),
    (0.5, 1.0, -0.5, False, False),
    (0.5, -1.0, 0.8, True, False),
    (1.5, -1.0, 1.5, False, False),
    (5.0, -1.0, 3.0, False, True),
    (5.0, -2.0, 6.0, False, True),
    (5.0, 1.0, -1.28, True, False),
    (5.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "dual"), POLICY_TABLE)
def test_policy_loss_is_that_worked_by_hand(ratio, advantage, loss, clipped, dual):
    found = policy_loss(CLIPS, jnp.log(jnp.full((1, 1), ratio)), jnp.full((1, 1), advantage))
    assert found.loss[0, 0] == pytest.approx(loss, abs=1e-6)
    assert (bool(found.clipped[0, 0]), bool(found.dual_clipped[0, 0])) == (clipped, dual)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_positive_factor_on_the_advantage_scales_the_loss(factor):
    ratio_BT = jnp.log(jnp.array([[row[0] for row in POLICY_TABLE]]))
    advantages_BT = jnp.array([[row[1] for row in POLICY_TABLE]])
    scaled = policy_loss(CLIPS, ratio_BT, factor * advantages_BT).loss
    np.testing.assert_allclose(scaled, factor * policy_loss(CLIPS, ratio_BT, advantages_BT).loss, rtol=1e-6)


# d = log 2 and d = -log 2
@pytest.mark.parametrize(
    ("estimator", "above", "below"),
    [("k1", 0.693147, -0.693147), ("k2", 0.240227, 0.240227), ("k3", 0.193147, 0.306853)],
)
def test_divergence_is_that_worked_by_hand(estimator, above, below):
    found = kl_estimate(estimator, jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5])))
    np.testing.assert_allclose(found, [above, below], atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_divergence_estimates_are_right_on_average(estimator):
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.3, 0.5])
    truth = jnp.sum(p * jnp.log(p / q))
    assert jnp.sum(p * kl_estimate(estimator, jnp.log(p), jnp.log(q))) == pytest.approx(float(truth), rel=1e-5)


def test_means_run_over_the_sampled_tokens_of_each_conversation():
    values_BT = jnp.array([[9.0, 1, 3, 9, 5, 0], [2, 4, 6, 7, 7, 7]])
    mask_BT = jnp.array([[0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
    segment_ids_BT = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    expected = [[2.0, 2, 2, 5, 5, 0], [4, 4, 4, 4, 0, 0]]
    np.testing.assert_allclose(conversation_mean(values_BT, mask_BT, segment_ids_BT), expected)


def rows_of_three_conversations(rng: np.random.Generator) -> Rows:
    segment_ids_BT = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
    mask_BT = np.array([[0, 1, 1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0, 0]], bool)
    tokens_BT = rng.integers(0, 9, mask_BT.shape)
    return Rows(tokens_BT, np.zeros_like(tokens_BT), segment_ids_BT, mask_BT)


def test_gspo_is_the_mean_of_one_clipped_term_per_conversation():
    rng = np.random.default_rng(0)
    rows = rows_of_three_conversations(rng)
    old_BT = rng.normal(-2, 0.1, rows.tokens.shape).astype(np.float32)
    logprobs_BT = jnp.asarray(old_BT + rng.normal(0, 4e-4, old_BT.shape), jnp.float32)
    conversations = [(0, slice(1, 4), 1.0), (0, slice(5, 7), -0.5), (1, slice(2, 6), 2.0)]
    advantages_BT, weights_BT = np.zeros_like(old_BT), np.zeros_like(old_BT)
    for row, span, advantage in conversations:
        advantages_BT[row, span] = advantage
        weights_BT[row, span] = 1 / 3 / (span.stop - span.start)
    batch = Batch(rows, old_BT, old_BT, np.zeros_like(old_BT), advantages_BT, weights_BT)
    gspo = PRESETS["gspo"]

    def packed(logprobs_BT):
        return objective_loss(gspo, logprobs_BT, jnp.zeros_like(old_BT), batch, rows.loss_mask.sum())[0]

    def by_conversation(logprobs_BT):
        terms = []
        for row, span, advantage in conversations:
            s = jnp.exp(jnp.mean((logprobs_BT - old_BT)[row, span]))
            clipped = jnp.clip(s, 1 - gspo.clip_low, 1 + gspo.clip_high)
            terms.append(-jnp.minimum(s * advantage, clipped * advantage))
        return sum(terms) / 3

    loss, grad = jax.jit(jax.value_and_grad(packed))(logprobs_BT)
    expected_loss, expected_grad = jax.jit(jax.value_and_grad(by_conversation))(logprobs_BT)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_the_loss_adds_policy_divergence_and_entropy_with_their_weights():
    mask_BT = np.array([[False, True, True]])
    rows = Rows(np.zeros((1, 3), int), np.zeros((1, 3), int), np.ones((1, 3), int), mask_BT)
    half, quarter = np.log(0.5), np.log(0.25)
    batch = Batch(
        rows=rows,
        rollout_logprobs=np.array([[0, half, half]]),
        old_logprobs=np.array([[0, half, quarter]]),
        ref_logprobs=np.array([[0, quarter, half]]),
        advantages=np.array([[0, 2.0, -1.0]]),
        weights=np.array([[0, 0.5, 0.25]]),
    )
    objective = ObjectiveConfig(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    logprobs_BT, entropy_BT = jnp.array([[0, half, half]]), jnp.array([[0.0, 1.0, 3.0]])
    loss, metrics = jax.jit(partial(objective_loss, objective))(logprobs_BT, entropy_BT, batch, 2)
    # ratios 1 and 2: losses -2 and 2; divergences d = log 2 and 0; entropies 1 and 3
    expected = {
        "actor/pg_loss": 0.5 * -2 + 0.25 * 2,
        "actor/kl_loss": 0.5 * np.log(2) ** 2 / 2,
        "actor/entropy": 0.5 + 0.75,
        "actor/pg_clipfrac": 0.0,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": (0 + quarter - half) / 2,
        "training/rollout_probs_diff_mean": 0.0,
        "training/rollout_probs_diff_max": 0.0,
    }
    expected["actor/loss"] = expected["actor/pg_loss"] + 0.1 * expected["actor/kl_loss"] - 0.01 * 1.25
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-6)
    assert loss == metrics["actor/loss"]


def test_a_wildly_improbable_token_leaves_loss_and_gradient_finite():
    objective = ObjectiveConfig(kl_coef=1.0)
    mask_BT = jnp.ones((1, 1), bool)

    def loss(logprob):
        ratio_BT = log_ratio(objective, logprob, jnp.full((1, 1), -300.0), mask_BT, mask_BT.astype(int))
        divergence = kl_estimate("k3", logprob, jnp.full((1, 1), 0.0))
        return (policy_loss(objective, ratio_BT, -mask_BT.astype(float)).loss + divergence).sum()

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.full((1, 1), -500.0))
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
