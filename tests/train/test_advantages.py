import numpy as np
import pytest
from train_samples import trajectory

from memjax.train.advantages import (
    group_advantages,
    informative,
    keep_informative,
    overlong_penalty,
    trajectory_rewards,
)
from memjax.train.presets import ObjectiveConfig

# group a: mean 1/2, deviation sqrt(1/3); group b: mean 1/2, deviation 1/2; group c has no variance; d is alone
GROUPS = ["a", "b", "a", "a", "b", "a", "b", "c", "c", "d"]
REWARDS = np.array([1.0, 1.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.1, 0.1, 1.0])
TABLE = {
    "mean": [0.5, 0.5, -0.5, -0.5, 0, 0.5, -0.5, 0, 0, 0],
    "mean_std": [0.866025, 1, -0.866025, -0.866025, 0, 0.866025, -1, 0, 0, 0],
    "leave_one_out": [2 / 3, 0.75, -2 / 3, -2 / 3, 0, 2 / 3, -0.75, 0, 0, 0],
}


@pytest.mark.parametrize("kind", TABLE)
def test_advantages_are_those_worked_by_hand(kind):
    found = group_advantages(REWARDS, GROUPS, kind)
    np.testing.assert_allclose(found, TABLE[kind], atol=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("kind", TABLE)
def test_equal_rewards_give_exactly_zero(kind):
    assert not group_advantages(np.full(3, 0.1), ["a"] * 3, kind).any()


@pytest.mark.parametrize("kind", TABLE)
def test_the_order_of_trajectories_does_not_matter(kind):
    order = np.random.default_rng(0).permutation(len(GROUPS))
    shuffled = group_advantages(REWARDS[order], [GROUPS[i] for i in order], kind)
    np.testing.assert_allclose(shuffled, group_advantages(REWARDS, GROUPS, kind)[order], rtol=1e-6)


def test_groups_without_variance_are_found():
    assert informative(REWARDS, GROUPS).tolist() == [True] * 7 + [False] * 3


def test_rewards_that_differ_a_little_are_told_apart():
    # 19 or 20 of 21 words right: what f1 and the like give
    rewards, groups = np.array([19 / 21, 20 / 21, 20 / 21, 0.5, 0.5 + 1e-6]), ["a", "a", "a", "b", "b"]
    assert informative(rewards, groups).all()
    advantages = [2 / 3, -1 / 3, -1 / 3]
    np.testing.assert_allclose(group_advantages(rewards, groups, "mean")[:3], np.array(advantages) / -21, rtol=1e-5)
    np.testing.assert_allclose(
        group_advantages(rewards, groups, "mean_std")[:3], np.array(advantages) * -(3**0.5), rtol=1e-4
    )
    kept = keep_informative([trajectory(r, "a", [(2, 1)]) for r in rewards[:3]], ObjectiveConfig(dynamic_sampling=True))
    assert len(kept) == 3


def test_dynamic_sampling_keeps_the_groups_with_variance():
    given = [trajectory(r, g, [(2, 1)]) for r, g in zip(REWARDS, GROUPS, strict=True)]
    kept = keep_informative(given, ObjectiveConfig(dynamic_sampling=True))
    assert [t.group_id for t in kept] == GROUPS[:7]
    assert len(keep_informative(given, ObjectiveConfig())) == len(given)


@pytest.mark.parametrize(("sampled", "penalty"), [(6, 0), (7, 0.125), (8, 0.25), (10, 0.5), (13, 0.5)])
def test_length_costs_more_and_more_up_to_the_limit(sampled, penalty):
    objective = ObjectiveConfig(overlong_limit=10, overlong_buffer=4, overlong_penalty=0.5)
    longest_counts = trajectory(1.0, "a", [(2, 1), (9, sampled), (2, 3)])
    assert overlong_penalty([longest_counts], objective).tolist() == [penalty]


def test_a_trajectory_without_conversations_has_no_length():
    assert overlong_penalty(
        [trajectory(0.0, "a", [])], ObjectiveConfig(overlong_limit=8, overlong_buffer=4)
    ).tolist() == [0]


def test_a_limit_that_nobody_set_is_refused():
    with pytest.raises(ValueError, match="within_budgets sets both"):
        overlong_penalty([trajectory(0.0, "a", [(2, 1)])], ObjectiveConfig(overlong_buffer=4))


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="score every trajectory"):
        trajectory_rewards([trajectory(reward, "a", [(2, 1)])])
