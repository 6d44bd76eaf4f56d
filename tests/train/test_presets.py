from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from train_samples import trajectories

from memjax.agents.memagent import MemAgent
from memjax.agents.no_context import NoContext
from memjax.train.advantages import keep_informative
from memjax.train.batches import make_batches
from memjax.train.losses import objective_loss
from memjax.train.packing import PackingConfig, pack
from memjax.train.presets import PRESETS, ObjectiveConfig, preset, within_budgets
from memjax.trajectory import Conversation, Span, Trajectory

LEARNER = {"old_logprobs": "learner"}
KL = {"kl_coef": 0.1}
OVERLONG = {"overlong_limit": 4, "overlong_buffer": 2}
# field: (what else the two objectives have in common, one value, another)
CHANGES = {
    "advantage": ({}, "mean", "mean_std"),
    "aggregation": ({}, "token", "trajectory"),
    "constant_tokens": ({"aggregation": "constant"}, 8, 16),
    "dynamic_sampling": ({}, False, True),
    "clip_low": ({}, 0.1, 0.3),
    "clip_high": ({}, 0.1, 0.3),
    "dual_clip": ({}, 1.1, None),
    "ratio": ({}, "token", "conversation"),
    "kl_coef": ({}, 0.0, 0.1),
    "kl_estimator": (KL, "k2", "k3"),
    "kl_in": (KL, "loss", "reward"),
    "entropy_coef": ({}, 0.0, 0.1),
    "old_logprobs": ({}, "rollout", "learner"),
    "importance": (LEARNER, "none", "token"),
    "importance_cap": (LEARNER | {"importance": "trajectory"}, 1.0, 2.0),
    "overlong_limit": ({"overlong_buffer": 2}, 4, 40),
    "overlong_buffer": ({"overlong_limit": 4}, 0, 2),
    "overlong_penalty": (OVERLONG, 0.5, 1.0),
    "step_credit": ({}, 0.0, 0.1),
    "mask_truncated": ({}, False, True),
}


def rollouts() -> list[Trajectory]:
    """Two groups that differ in reward and in a step's, one that does not, and one conversation that was cut."""
    made = trajectories(groups=3, size=3, seed=4)
    level = [Trajectory(t.task_id, t.group_id, t.conversations, "", 0.0) for t in made[6:]]
    first = made[0].conversations[0]
    cut = Conversation(first.token_ids, first.loss_mask, first.logprobs, first.kind, truncated=True)
    made[0] = Trajectory(made[0].task_id, made[0].group_id, (cut, *made[0].conversations[1:]), "", 1.0)
    for i, one in enumerate(made):
        last = one.conversations[-1]
        spans = (Span(int(last.loss_mask.argmax()), len(last.token_ids), "1", float(i % 2)),)
        made[i] = replace(one, conversations=(*one.conversations[:-1], replace(last, spans=spans)))
    return made[:6] + level


def result(objective: ObjectiveConfig) -> tuple[float, np.ndarray]:
    """The loss of a policy some way from the one that sampled, and its gradient in the log-probabilities."""
    kept = keep_informative(rollouts(), objective)
    steps = pack(kept, PackingConfig(row_tokens=16, micro_batch_tokens=512), mask_truncated=objective.mask_truncated)

    def near(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [step.rollout_logprobs + rng.normal(0, 0.4, step.rollout_logprobs.shape) for step in steps]

    (batch,) = make_batches(steps, kept, objective, learner_logprobs=near(0), ref_logprobs=near(1))
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    entropy_BT = jnp.where(micro.rows.loss_mask, 2.0, 0.0)

    def of_logprobs(logprobs_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return objective_loss(objective, logprobs_BT, entropy_BT, micro, micro.rows.loss_mask.sum())

    # Not jitted: one operation at a time compiles once for all objectives.
    grad = jax.value_and_grad(of_logprobs, has_aux=True)
    (value, _), gradient = grad(jnp.asarray(near(2)[0][0], jnp.float32))
    return float(value), np.asarray(gradient)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_objective_changes_the_result(field):
    common, one, other = CHANGES[field]
    first, second = (result(ObjectiveConfig(**(common | {field: value}))) for value in (one, other))
    same_gradient = first[1].shape == second[1].shape and np.allclose(first[1], second[1], atol=1e-6)
    assert abs(first[0] - second[0]) > 1e-6 or not same_gradient


def test_the_table_of_changes_names_every_field():
    assert set(CHANGES) == set(ObjectiveConfig.model_fields)
    assert len(CHANGES) <= 20


def test_every_field_says_what_it_does():
    assert all(field.description for field in ObjectiveConfig.model_fields.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plain_values_with_a_finite_loss(name):
    assert type(preset(name)) is ObjectiveConfig
    value, grad = result(within_budgets(preset(name), MemAgent()))
    assert np.isfinite(value)
    assert np.abs(grad).max() > 0


def test_presets_differ():
    assert len({objective.model_dump_json() for objective in PRESETS.values()}) == len(PRESETS)


# Every field, so that a default that changes is seen too. The clips of 0.2 are PPO's (arXiv 1707.06347).
PLAIN = {
    "advantage": "mean",
    "aggregation": "token",
    "constant_tokens": 1024,
    "dynamic_sampling": False,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "ratio": "token",
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "entropy_coef": 0.0,
    "old_logprobs": "rollout",
    "importance": "none",
    "importance_cap": 2.0,
    "overlong_limit": None,
    "overlong_buffer": 0,
    "overlong_penalty": 1.0,
    "step_credit": 0.0,
    "mask_truncated": False,
}
PUBLISHED = {
    # run_memory_7B.sh, run_memory_14B.sh and the defaults of verl that they leave alone (BytedTsinghua-SIA/MemAgent at
    # 76b7a65): grpo_use_adv=False, clip_ratio_high=0.20, clip_ratio_c 3, low_var_kl of 0.001 in the loss, token-mean,
    # entropy 0, no filter_groups, log-probabilities recomputed by the actor before its first update
    "memagent-script": {"dual_clip": 3.0, "kl_coef": 0.001, "kl_estimator": "k3", "old_logprobs": "learner"},
    # DAPO, arXiv 2503.14476: clips 0.2 and 0.28, no divergence, Eq. 9 standardises, Eq. 8 means over the tokens of the
    # batch, Eq. 11 draws again where all or none is right, Eq. 13 with 4,096 of 20,480 tokens, a fifth
    "dapo": {
        "advantage": "mean_std",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": None,
        "overlong_penalty": 1.0,
    },
    # GRPO, arXiv 2402.03300: Eq. 3 means over each output's own tokens, divergence k3 (Eq. 4) with coefficient 0.04
    "grpo": {"advantage": "mean_std", "aggregation": "trajectory", "kl_coef": 0.04, "kl_estimator": "k3"},
    # Dr. GRPO, arXiv 2503.20783: neither the deviation nor the own length, a constant budget of tokens; no divergence
    "dr-grpo": {"advantage": "mean", "aggregation": "constant", "constant_tokens": 1024, "kl_coef": 0.0},
    # GSPO, arXiv 2507.18071, Section 5.1: clips 3e-4 and 4e-4 of a sequence's ratio to the policy before the updates
    "gspo": {
        "advantage": "mean_std",
        "aggregation": "conversation",
        "ratio": "conversation",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
        "old_logprobs": "learner",
    },
    # RLOO, arXiv 2402.14740: mean of the others as baseline, the log ratio taken off the reward; 0.05 is TRL's default
    "rloo": {
        "advantage": "leave_one_out",
        "aggregation": "constant",
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_numbers_that_were_published(name):
    assert preset(name).model_dump() == PLAIN | PUBLISHED[name]


def test_dapo_s_over_length_numbers_are_the_paper_s_at_its_length():
    objective = within_budgets(preset("dapo"), NoContext(answer=20_480))
    assert (objective.overlong_limit, objective.overlong_buffer) == (20_480, 4096)


class Bare:
    """An agent whose attributes are whatever a user thought of."""

    def __init__(self, **given: object):
        self.__dict__.update(given)


@pytest.mark.parametrize(
    ("agent", "given", "limit", "buffer"),
    [
        (MemAgent(), {}, 1024, 205),
        (MemAgent(memory=2048), {}, 2048, 410),
        (MemAgent(memory=100, answer=300), {}, 300, 60),
        (MemAgent(), {"overlong_limit": 1000}, 1000, 200),
        (MemAgent(), {"overlong_buffer": 24}, 1024, 24),
        (Bare(answer=2), {}, 2, 1),
        (Bare(memory="a text", answer=True, conversation=500), {}, 500, 100),
        (Bare(), {"overlong_limit": 50}, 50, 10),
    ],
)
def test_the_over_length_penalty_follows_the_agents_budgets(agent, given, limit, buffer):
    objective = within_budgets(preset("dapo").model_copy(update=given), agent)
    assert (objective.overlong_limit, objective.overlong_buffer) == (limit, buffer)


@pytest.mark.parametrize(
    ("agent", "given", "message"),
    [
        (Bare(), {}, r"overlong_limit is null, .* this agent has neither: set it to a number of tokens"),
        (MemAgent(memory=64, answer=32), {"overlong_limit": 65}, r"\(65\) is more than .* \(memory 64, answer 32\)"),
        (MemAgent(memory=64, answer=32), {"overlong_buffer": 65}, r"overlong_buffer \(65\) must not exceed .* \(64\)"),
    ],
)
def test_an_over_length_penalty_that_no_reply_could_meet_is_refused(agent, given, message):
    with pytest.raises(ValueError, match=message):
        within_budgets(preset("dapo").model_copy(update=given), agent)


def test_without_the_penalty_no_agent_needs_a_budget():
    assert within_budgets(ObjectiveConfig(), Bare()) == ObjectiveConfig()


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'ppo'.*memagent-script.*rloo"):
        preset("ppo")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"importance": "token"}, "old_logprobs: learner"),
        ({"overlong_limit": 4, "overlong_buffer": 5}, "must not exceed"),
        ({"clip_higher": 0.28}, "clip_higher"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**fields)
