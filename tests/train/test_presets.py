from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from train_samples import trajectories

from memjax.train.advantages import keep_informative
from memjax.train.batches import make_batches
from memjax.train.losses import objective_loss
from memjax.train.packing import PackingConfig, pack
from memjax.train.presets import PRESETS, ObjectiveConfig, preset
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
    value, grad = result(preset(name))
    assert np.isfinite(value)
    assert np.abs(grad).max() > 0


def test_presets_differ():
    assert len({objective.model_dump_json() for objective in PRESETS.values()}) == len(PRESETS)


def test_the_script_preset_has_the_numbers_of_the_script():
    objective = preset("memagent-script")
    assert (objective.advantage, objective.aggregation, objective.dynamic_sampling) == ("mean", "token", False)
    assert (objective.clip_low, objective.clip_high, objective.dual_clip) == (0.2, 0.2, 3.0)
    assert (objective.kl_coef, objective.kl_estimator, objective.kl_in) == (0.001, "k3", "loss")


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
