from dataclasses import replace

import jax
import numpy as np
import pytest
from train_samples import trajectories, trajectory

from memjax.train.batches import importance_weights, make_batches, sum_by_trajectory, token_weights
from memjax.train.packing import PackedStep, PackingConfig, pack
from memjax.train.presets import ObjectiveConfig
from memjax.trajectory import Span, Trajectory

ONE_STEP = PackingConfig(16, 64)


def by_conversation(step: PackedStep, values_MBT: np.ndarray) -> list[list[float]]:
    """The values at the sampled tokens of each conversation, rounded."""
    mask_MBT = step.rows.loss_mask
    values_MBT = values_MBT.astype(np.float64).round(6)
    return [values_MBT[mask_MBT & (step.conversation == i)].tolist() for i in range(step.conversations)]


# One trajectory with conversations of 2 and 1 sampled tokens, one with a single conversation of 6.
WEIGHTS = {
    "token": [[1 / 9] * 2, [1 / 9], [1 / 9] * 6],
    "trajectory": [[1 / 6] * 2, [1 / 6], [1 / 12] * 6],
    "conversation": [[1 / 6] * 2, [1 / 3], [1 / 18] * 6],
    "constant": [[1 / 20] * 2, [1 / 20], [1 / 20] * 6],
}


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_weights_are_those_worked_by_hand(aggregation):
    (step,) = pack([trajectory(1.0, "a", [(3, 2), (4, 1)]), trajectory(0.0, "a", [(2, 6)])], ONE_STEP)
    weights_MBT = token_weights(step, aggregation, constant_tokens=10)
    assert by_conversation(step, weights_MBT) == [[round(w, 6) for w in row] for row in WEIGHTS[aggregation]]
    assert not weights_MBT[~step.rows.loss_mask].any()


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "conversation"])
def test_weights_of_a_mean_add_up_to_one(aggregation):
    for step in pack(trajectories(groups=3), PackingConfig(16, 32, optimizer_steps=3)):
        assert token_weights(step, aggregation).sum() == pytest.approx(1, abs=1e-6)


def test_every_token_of_every_conversation_has_its_trajectory_s_advantage():
    made = [trajectory(1.0, "a", [(3, 2), (4, 1)], 0), trajectory(0.0, "a", [(2, 2)], 1)]
    steps = pack(made, ONE_STEP)
    (batch,) = make_batches(steps, made, ObjectiveConfig())
    assert by_conversation(steps[0], batch.advantages) == [[0.5] * 2, [0.5], [-0.5] * 2]


def test_groups_are_compared_with_themselves_whichever_step_they_are_in():
    made = [trajectory(float(i == 0), "ab"[i // 4], [(2, 1)], i) for i in range(8)]
    steps = pack(made, PackingConfig(8, 8, optimizer_steps=2))
    batches = make_batches(steps, made, ObjectiveConfig())
    assert [sorted(batch.advantages[batch.rows.loss_mask]) for batch in batches] == [[-0.25] * 3 + [0.75], [0.0] * 4]


def with_step_rewards(group: str = "a") -> list[Trajectory]:
    """Two samples of one task: at step 1 they have 1 and 0, at step 2 5 and 3; step 3 only the first has."""
    made = [trajectory(1.0, group, [(3, 4)], 0), trajectory(0.0, group, [(2, 1), (2, 2)], 1)]
    spans = [[(Span(3, 4, "1", 1.0), Span(5, 6, "3", 9.0), Span(6, 7, "2", 5.0))]]
    spans += [[(Span(2, 3, "1", 0.0),), (Span(3, 4, "2", 3.0),)]]
    return [
        replace(t, conversations=tuple(replace(c, spans=s) for c, s in zip(t.conversations, of, strict=True)))
        for t, of in zip(made, spans, strict=True)
    ]


@pytest.mark.parametrize("updates", [1, 2])
def test_step_credit_is_that_worked_by_hand(updates):
    made = with_step_rewards("a") + with_step_rewards("b")
    steps = pack(made, PackingConfig(16, 32, optimizer_steps=updates))
    batches = make_batches(steps, made, ObjectiveConfig(step_credit=0.2))
    found = [row for step, batch in zip(steps, batches, strict=True) for row in by_conversation(step, batch.advantages)]
    # 0.8 x (r - 0.5), and 0.2 x (r - 0.5) at step 1, 0.2 x (r - 4) at step 2; step 3 has nothing to be compared with
    assert found == 2 * [[0.5, 0.4, 0.4, 0.6], [-0.5], [-0.4, -0.6]]


def test_without_step_credit_step_rewards_change_no_bit():
    made = with_step_rewards()
    plain = [replace(t, conversations=tuple(replace(c, spans=()) for c in t.conversations)) for t in made]
    for objective in (ObjectiveConfig(), ObjectiveConfig(advantage="mean_std", aggregation="conversation")):
        rows = [make_batches(pack(given, ONE_STEP), given, objective)[0] for given in (made, plain)]
        for ours, theirs in zip(*map(jax.tree.leaves, rows), strict=True):
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_duplicated_turns_do_not_change_group_statistics(kind):
    made = trajectories()
    doubled = [replace(made[0], conversations=made[0].conversations * 2), *made[1:]]

    def advantages(trajectories_):
        steps = pack(trajectories_, PackingConfig(16, 128))
        (batch,) = make_batches(steps, trajectories_, ObjectiveConfig(advantage=kind))
        mask = steps[0].rows.loss_mask
        return dict(zip(steps[0].trajectory[mask].tolist(), batch.advantages[mask].tolist(), strict=True))

    assert advantages(doubled) == advantages(made)


def test_divergence_from_the_reference_is_taken_from_the_reward():
    made = [trajectory(1.0, "a", [(2, 1), (2, 2)], 0), trajectory(1.0, "a", [(2, 4)], 1)]
    steps = pack(made, ONE_STEP)
    reference = [steps[0].rollout_logprobs - 0.5]
    objective = ObjectiveConfig(kl_coef=0.1, kl_estimator="k1", kl_in="reward")
    (batch,) = make_batches(steps, made, objective, ref_logprobs=reference)
    # sums of 3 x 0.5 and 4 x 0.5 nats: rewards 0.85 and 0.8
    assert by_conversation(steps[0], batch.advantages) == [[0.025], [0.025] * 2, [-0.025] * 4]


def test_importance_weights_are_those_worked_by_hand():
    made = [trajectory(1.0, "a", [(2, 1), (2, 2)], 0), trajectory(0.0, "a", [(2, 1)], 1)]
    steps = pack(made, ONE_STEP)
    gap = np.zeros_like(steps[0].rollout_logprobs)
    # log weights per sampled token: trajectory 0 has log 2 | log 2, log 4; trajectory 1 has log 0.25
    for i, values in enumerate([[2], [2, 4], [0.25]]):
        gap[(steps[0].conversation == i) & steps[0].rows.loss_mask] = np.log(values)
    old = [steps[0].rollout_logprobs + gap]
    for level, expected in [
        ("none", [[1], [1, 1], [1]]),
        ("token", [[2], [2, 3], [0.25]]),
        ("trajectory", [[3], [3, 3], [0.25]]),
    ]:
        objective = ObjectiveConfig(importance=level, importance_cap=3.0, old_logprobs="learner")
        (weights,) = importance_weights(steps, old, 2, objective)
        assert by_conversation(steps[0], weights) == expected
    objective = ObjectiveConfig(importance="trajectory", importance_cap=20.0, old_logprobs="learner")
    (batch,) = make_batches(steps, made, objective, learner_logprobs=old)
    assert by_conversation(steps[0], batch.advantages) == [[8.0], [8.0] * 2, [-0.125]]


def test_importance_of_a_trajectory_is_of_all_its_steps_and_survives_thousands_of_tokens():
    made = [trajectory(0.0, "a", [(1, 3000), (1, 3000)])]
    steps = pack(made, PackingConfig(4096, 8192))
    objective = ObjectiveConfig(importance="trajectory", old_logprobs="learner")
    for shift, expected in [(1.0, 2.0), (-1.0, 0.0)]:
        (weights,) = importance_weights(steps, [steps[0].rollout_logprobs + shift], 1, objective)
        assert weights[steps[0].rows.loss_mask] == pytest.approx(expected)


def test_sums_run_over_all_conversations_of_a_trajectory():
    made = trajectories(groups=2)
    steps = pack(made, PackingConfig(16, 32, optimizer_steps=2))
    sums = sum_by_trajectory(steps, [step.rollout_logprobs for step in steps], len(made))
    np.testing.assert_allclose(sums, [sum(c.logprobs.sum() for c in t.conversations) for t in made], rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "message"),
    [(ObjectiveConfig(old_logprobs="learner"), "pass of the learner"), (ObjectiveConfig(kl_coef=0.1), "reference")],
)
def test_log_probabilities_that_the_objective_reads_must_be_given(objective, message):
    made = trajectories()
    with pytest.raises(ValueError, match=message):
        make_batches(pack(made, PackingConfig(16, 64)), made, objective)
