from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_samples import CONFIG, VOCAB, trajectories

from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions
from memjax.models.qwen2 import Params, init_params
from memjax.sharding import TRAIN, Layout
from memjax.train.batches import make_batches
from memjax.train.logprobs import LogprobOptions
from memjax.train.losses import Batch, objective_loss
from memjax.train.optimizer import OptimizerConfig
from memjax.train.packing import PackedStep, PackingConfig, Rows, pack
from memjax.train.presets import ObjectiveConfig
from memjax.train.step import abstract_state, gradients, init_state, make_scorer, make_update, place

LOGPROBS = LogprobOptions(VOCAB, chunk=4)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
# Every term of the loss is at work, and the samples are far enough from the policy for both clips.
OBJECTIVE = ObjectiveConfig(dual_clip=1.1, kl_coef=0.1, entropy_coef=0.01)
ONE_DEVICE = ModelOptions()
# Compiling takes most of the time of these tests.
QUICK = {"xla_backend_optimization_level": 0}
SAMPLES = trajectories(groups=2, size=4, seed=3)


def on_mesh(*sizes: int) -> ModelOptions:
    return ModelOptions(layout=Layout(make_mesh(*sizes), TRAIN))


@lru_cache
def parameters(options: ModelOptions) -> Params:
    return init_params(CONFIG, options, jax.random.key(0))


def packed_step(row_tokens: int = 24, rows: int = 8) -> PackedStep:
    (step,) = pack(SAMPLES, PackingConfig(row_tokens, row_tokens * rows))
    return step


def batch_of(step: PackedStep, objective: ObjectiveConfig = OBJECTIVE) -> Batch:
    # A reference that depends on the token alone, so that it follows its token wherever that is packed.
    reference = np.where(step.rows.loss_mask, -3.0 - 0.05 * step.rows.tokens, 0.0).astype(np.float32)
    (batch,) = make_batches([step], SAMPLES, objective, ref_logprobs=[reference])
    return batch


@lru_cache
def gradient_function(options: ModelOptions, objective: ObjectiveConfig = OBJECTIVE):
    loss = partial(objective_loss, objective)
    return jax.jit(
        lambda params, batch: gradients(params, batch, CONFIG, options, LOGPROBS, loss), compiler_options=QUICK
    )


def evaluate(batch: Batch, options: ModelOptions = ONE_DEVICE):
    return gradient_function(options)(parameters(options), place(batch, options.layout))


@pytest.fixture(scope="module")
def expected():
    """Gradients and metrics of the packed rows in one micro-batch on one device."""
    return evaluate(batch_of(packed_step()))


def assert_equal(found, expected):
    """Metrics and gradients agree to 1e-5 of the largest gradient."""
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected[0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * scale), found[0], expected[0])


def test_the_batch_of_these_tests_clips_both_ways(expected):
    _, metrics = expected
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_clipfrac_lower"] > 0.05
    assert metrics["actor/kl_loss"] > 0.01
    assert all(np.isfinite(value) for value in metrics.values())


def test_packed_rows_equal_separate_forward_passes(expected):
    packed = packed_step()
    separate = one_conversation_per_row(packed)
    assert packed.rows.segment_ids.max() > 2
    assert separate.rows.segment_ids.max() == 1
    assert_equal(evaluate(batch_of(separate)), expected)


def one_conversation_per_row(step: PackedStep) -> PackedStep:
    """The same conversations, each at the start of a row of its own."""
    spans = [step.conversation == i for i in range(step.conversations)]
    row_tokens = max(int(at.sum()) for at in spans)

    def spread(x_MBT: np.ndarray, padding: int = 0) -> np.ndarray:
        rows = [np.pad(x_MBT[at], (0, row_tokens - int(at.sum())), constant_values=padding) for at in spans]
        return np.stack(rows)[None]

    rows = Rows(*(spread(x) for x in step.rows))
    rows = rows._replace(segment_ids=np.minimum(rows.segment_ids, 1))
    owners = spread(step.trajectory, -1), spread(step.conversation, -1)
    return PackedStep(rows, spread(step.rollout_logprobs), *owners, step.conversations)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_cut_into_micro_batches_does_not_matter(rows, expected):
    batch = batch_of(packed_step(rows=rows))
    assert len(batch.weights) > 2
    assert_equal(evaluate(batch), expected)


def test_the_order_of_rows_does_not_matter(expected):
    order = np.random.default_rng(0).permutation(8)
    assert_equal(evaluate(jax.tree.map(lambda x: x[:, order], batch_of(packed_step()))), expected)


def test_the_place_of_empty_micro_batches_does_not_matter(expected):
    batch = batch_of(packed_step(rows=2))
    assert_equal(evaluate(jax.tree.map(lambda x: np.roll(x, 1, axis=0), batch)), expected)
    grads, metrics = evaluate(jax.tree.map(np.zeros_like, batch))
    assert not any(np.any(x) for x in jax.tree.leaves((grads, metrics)))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1)])
def test_eight_devices_equal_one(sizes, expected):
    assert_equal(evaluate(batch_of(packed_step()), on_mesh(*sizes)), expected)


def test_scanned_and_recomputed_layers_in_bfloat16_stay_near(expected):
    # Made in float32 under the scanned layout, then multiplied in bfloat16.
    options = ModelOptions(compute_dtype=jnp.bfloat16, scan_layers=True, remat=True)
    grads, metrics = evaluate(batch_of(packed_step()), options)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert metrics["actor/entropy"] == pytest.approx(float(expected[1]["actor/entropy"]), rel=0.05)


def test_zero_advantage_gives_zero_gradient():
    batch = batch_of(packed_step())._replace(advantages=np.zeros((1, 8, 24), np.float32))
    grads, _ = gradient_function(ONE_DEVICE, ObjectiveConfig())(parameters(ONE_DEVICE), place(batch, None))
    assert not any(x.any() for x in jax.tree.leaves(grads))


# The update


@lru_cache
def update_function(options: ModelOptions = ONE_DEVICE):
    update = make_update(CONFIG, options, LOGPROBS, OPTIMIZER, partial(objective_loss, ObjectiveConfig()))
    state = abstract_state(CONFIG, options, OPTIMIZER)
    return update.lower(state, place(batch_of(packed_step()), options.layout)).compile(compiler_options=QUICK)


def fresh_state(options: ModelOptions = ONE_DEVICE):
    return init_state(jax.tree.map(jnp.copy, parameters(options)), CONFIG, options, OPTIMIZER)


def on_policy(step: PackedStep, params: Params, options: ModelOptions = ONE_DEVICE) -> Batch:
    """The batch as if these parameters had sampled it."""
    scores = make_scorer(CONFIG, options, LOGPROBS)(params, place(step.rows, options.layout))
    return batch_of(step)._replace(rollout_logprobs=np.asarray(scores), old_logprobs=np.asarray(scores))


def test_updates_make_rewarded_tokens_likelier_and_take_over_the_state():
    step, state = packed_step(), fresh_state()
    batch = on_policy(step, state.params)
    before = state
    first = None
    for _ in range(8):
        state, metrics = update_function()(state, place(batch, None))
        first = first or metrics
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
    # Samples of the policy itself: nothing to clip, no distance, and a mean of advantages for a loss.
    assert first["actor/pg_clipfrac"] == 0
    assert abs(first["actor/ppo_kl"]) < 1e-6
    assert first["training/rollout_probs_diff_max"] < 1e-6
    assert first["actor/lr"] == pytest.approx(0.005)
    assert first["actor/grad_norm"] > 0
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["actor/lr"] == pytest.approx(0.01)
    assert (int(state.step), int(state.skipped)) == (8, 0)
    scores = make_scorer(CONFIG, ONE_DEVICE, LOGPROBS)(state.params, place(step.rows, None))
    gain = np.asarray(scores) - batch.old_logprobs
    assert gain[batch.advantages > 0].mean() > 0.02 > -0.02 > gain[batch.advantages < 0].mean()


def test_an_update_that_is_no_number_is_skipped_and_counted():
    batch = place(batch_of(packed_step()), None)
    broken = batch._replace(advantages=batch.advantages.at[0, 0].set(jnp.nan))
    state, metrics = update_function()(fresh_state(), broken)
    assert (int(state.step), int(state.skipped), int(metrics["training/skipped_steps"])) == (0, 1, 1)
    untouched = fresh_state()
    jax.tree.map(np.testing.assert_array_equal, state[:3], untouched[:3])
    state, metrics = update_function()(state, batch)
    assert (int(state.step), int(state.skipped)) == (1, 1)
    assert metrics["actor/lr"] == pytest.approx(0.005)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_moments_take_gradients_no_larger_than_the_limit(scale):
    batch = batch_of(packed_step())
    batch = batch._replace(advantages=np.float32(scale) * batch.advantages)
    state, metrics = update_function()(fresh_state(), place(batch, None))
    norm = float(metrics["actor/grad_norm"])
    assert (norm > OPTIMIZER.clip_norm) == (scale > 1)
    taken = float(optax.tree.norm(optax.tree.get(state.opt_state, "mu"))) / (1 - OPTIMIZER.beta1)
    assert taken == pytest.approx(min(norm, OPTIMIZER.clip_norm), rel=1e-4)


def test_a_step_without_sampled_tokens_changes_nothing():
    batch = batch_of(packed_step())
    empty = jax.tree.map(np.zeros_like, batch)
    state, metrics = update_function()(fresh_state(), place(empty, None))
    assert (int(state.step), int(state.skipped), int(metrics["training/tokens"])) == (0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, state.params, parameters(ONE_DEVICE))


def test_the_sharded_update_equals_that_of_one_device_and_keeps_its_shards():
    sharded = on_mesh(2, 2, 2)
    batch = batch_of(packed_step())
    alone, metrics = update_function()(fresh_state(), place(batch, None))
    given = fresh_state(sharded)
    shardings = jax.tree.map(lambda x: x.sharding, given)
    state, sharded_metrics = update_function(sharded)(given, place(batch, sharded.layout))
    for name, value in metrics.items():
        np.testing.assert_allclose(sharded_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    # AdamW divides by the gradient's size: where that is mere rounding, the direction is too.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), state.params, alone.params)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 2]
    assert moments
    assert all(not x.sharding.is_fully_replicated for x in moments)


def test_the_scorer_gives_the_same_on_eight_devices():
    step, sharded = packed_step(), on_mesh(1, 8, 1)
    alone = make_scorer(CONFIG, ONE_DEVICE, LOGPROBS)(parameters(ONE_DEVICE), place(step.rows, None))
    spread = make_scorer(CONFIG, sharded, LOGPROBS)(parameters(sharded), place(step.rows, sharded.layout))
    assert spread.sharding.is_fully_replicated
    np.testing.assert_allclose(spread, alone, atol=1e-5)


def test_parameters_that_are_not_float32_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        make_update(
            CONFIG, ModelOptions(param_dtype=jnp.bfloat16), LOGPROBS, OPTIMIZER, partial(objective_loss, OBJECTIVE)
        )


def test_the_lookup_of_tokens_is_never_whole_on_every_device(capfd):
    """The compiler warns where it can only go from one layout to another through a copy of everything everywhere."""
    jax.clear_caches()
    options = on_mesh(2, 2, 2)
    gradient_function.__wrapped__(options).lower(
        abstract_state(CONFIG, options, OPTIMIZER).params, batch_of(packed_step())
    ).compile()
    assert "full rematerialization" not in capfd.readouterr().err
