"""The learner takes whole rollout batches: short ones, with a reference, and from a sampler not to be believed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions
from memjax.models.qwen2 import Params, init_params
from memjax.sharding import TRAIN, Layout
from memjax.train.learner import Learner
from memjax.train.logprobs import LogprobOptions
from memjax.train.losses import objective_loss
from memjax.train.mismatch import FLOAT32_LIMITS
from memjax.train.optimizer import OptimizerConfig
from memjax.train.packing import PackingConfig, Rows
from memjax.train.presets import ObjectiveConfig
from memjax.train.step import TrainState, init_state, make_scorer, make_update
from memjax.trajectory import Trajectory
from tests.train.train_samples import CONFIG, VOCAB, conversation, trajectories

OPTIONS = ModelOptions(layout=Layout(make_mesh(devices=jax.devices()[:1]), TRAIN))
OBJECTIVE = ObjectiveConfig(old_logprobs="learner", kl_coef=0.1)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
LOGPROBS = LogprobOptions(vocab_size=VOCAB)


def token_loss(*arguments: Any) -> Any:
    return objective_loss(OBJECTIVE, *arguments)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(
        objective=OBJECTIVE,
        packing=PackingConfig(row_tokens=32, micro_batch_tokens=128, optimizer_steps=4),
        groups=8,
        layout=OPTIONS.layout,
        limits=FLOAT32_LIMITS,
        update=make_update(CONFIG, OPTIONS, LOGPROBS, OPTIMIZER, token_loss),
        score=make_scorer(CONFIG, OPTIONS, LOGPROBS),
        reference=weights(0),
    )


@cache
def weights(seed: int) -> Params:
    return init_params(CONFIG, OPTIONS, jax.random.key(seed))


def fresh(seed: int = 0) -> TrainState:
    return init_state(jax.tree.map(jnp.copy, weights(seed)), CONFIG, OPTIONS, OPTIMIZER)


def as_sampled(learner: Learner, batch: list[Trajectory]) -> list[Trajectory]:
    """The trajectories with the log-probabilities that the weights of `fresh()` give them."""

    def scored(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rows = np.zeros((1, 4, 32), np.int32)
        rows[0, 0, : len(tokens)] = tokens
        segments, masks = np.zeros_like(rows), np.zeros(rows.shape, bool)
        segments[0, 0, : len(tokens)], masks[0, 0, : len(tokens)] = 1, mask
        positions = np.broadcast_to(np.arange(32, dtype=np.int32), rows.shape)
        return np.asarray(learner.score(weights(0), Rows(rows, positions, segments, masks)))[0, 0, : len(tokens)]

    return [
        replace(t, conversations=tuple(replace(c, logprobs=scored(c.token_ids, c.loss_mask)) for c in t.conversations))
        for t in batch
    ]


@pytest.mark.parametrize(("groups", "updates"), [(8, 4), (5, 2), (3, 2), (1, 1), (0, 0)])
def test_updates_are_in_proportion_to_the_groups(learner: Learner, groups: int, updates: int) -> None:
    state, _ = learner.learn(fresh(), trajectories(groups=groups, size=2))
    assert int(state.step) == updates


def test_one_informative_group_of_128_is_one_update(learner: Learner) -> None:
    packing = replace(learner.packing, optimizer_steps=16)
    state, _ = replace(learner, packing=packing, groups=128).learn(fresh(), trajectories(groups=1, size=2))
    assert int(state.step) == 1


def test_an_update_without_any_advantage_is_left_out(learner: Learner) -> None:
    solved = [replace(t, reward=1.0) for t in trajectories(groups=2)]
    without_kl = replace(learner, objective=OBJECTIVE.model_copy(update={"kl_coef": 0.0}), reference=None, groups=4)
    state, metrics = without_kl.learn(fresh(), solved)
    assert (int(state.step), int(state.skipped), metrics.keys()) == (0, 0, {"timing_s/update_actor"})
    same = jax.tree.map(np.array_equal, state.params, weights(0))
    assert all(jax.tree.leaves(same))
    state, _ = replace(learner, groups=4).learn(fresh(), solved)
    assert int(state.step) == 2, "the divergence from the reference is learned from all the same"


def test_the_alarm_is_silent_for_the_learner_s_own_samples_and_sounds_for_others(learner: Learner) -> None:
    batch = trajectories()
    sampled = as_sampled(learner, batch)
    metrics, alarm = learner.compare(weights(0), sampled)
    assert alarm is None
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    state, _ = learner.learn(fresh(), sampled)
    metrics, alarm = learner.compare(state.params, sampled)
    assert alarm is not None
    assert "rollout and learner disagree" in alarm


def test_the_reference_stays_where_it_is(learner: Learner) -> None:
    before = jax.tree.map(np.array, learner.reference)
    _, at_reference = learner.learn(fresh(0), trajectories())
    _, elsewhere = learner.learn(fresh(1), trajectories())
    assert 0 <= at_reference["actor/kl_loss"] < elsewhere["actor/kl_loss"]
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(learner.reference)))


def test_masking_leaves_out_the_conversations_that_were_cut_and_nothing_else(learner: Learner) -> None:
    def with_one_more(trajectory: Trajectory, *, cut: bool) -> Trajectory:
        more = conversation(3, 4, np.random.default_rng(9), truncated=cut)
        return replace(trajectory, conversations=(*trajectory.conversations, more))

    masking = replace(learner, objective=OBJECTIVE.model_copy(update={"mask_truncated": True}))
    batch = trajectories()
    plain, whole, masked, trained = (
        learn.learn(fresh(), given)[0].params
        for learn, given in (
            (learner, batch),
            (masking, [with_one_more(t, cut=False) for t in batch]),
            (masking, [with_one_more(t, cut=True) for t in batch]),
            (learner, [with_one_more(t, cut=True) for t in batch]),
        )
    )

    def equal(one: Params, other: Params) -> bool:
        return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))

    assert equal(masked, plain)
    assert equal(trained, whole)
    assert not equal(masked, trained)
