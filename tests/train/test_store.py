"""Checkpoints hold every bit, survive what happens around them, and say what they cannot do."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.checkpoint.store import TrainStore
from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions
from memjax.models.qwen2 import init_params
from memjax.sharding import TRAIN, Layout
from memjax.train.optimizer import OptimizerConfig
from memjax.train.step import TrainState, abstract_state, init_state
from tests.train.train_samples import CONFIG

POSITION = {"stage": 1, "step": 7, "tasks": 1 << 40}


def options(**mesh: int) -> ModelOptions:
    return ModelOptions(layout=Layout(make_mesh(**mesh), TRAIN))


def state_on(options: ModelOptions) -> TrainState:
    return init_state(init_params(CONFIG, options, jax.random.key(0)), CONFIG, options, OptimizerConfig())


def like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a: TrainState, b: TrainState) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_state_comes_back_bit_for_bit_on_another_mesh(tmp_path: Path) -> None:
    state = state_on(options(data=2, fsdp=2, tensor=2))
    with TrainStore(tmp_path) as store:
        store.save(7, state, POSITION)
    elsewhere = abstract_state(CONFIG, options(fsdp=4, tensor=2), OptimizerConfig())
    with TrainStore(tmp_path) as store:
        found = store.restore(elsewhere, POSITION)
    assert found is not None
    assert same(found[0], state)
    assert found[1] == POSITION
    assert all(a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (found[0], elsewhere)), strict=True))


def test_a_state_that_is_taken_over_while_it_is_written_is_written_as_it_was(tmp_path: Path) -> None:
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = {"x": jnp.arange(1 << 20, dtype=jnp.float32)}
    before, abstract = np.array(state["x"]), like(state)
    with TrainStore(tmp_path) as store:
        store.save(1, state, {})
        for _ in range(20):
            state = overwrite(state)
        store.wait()
        found = store.restore(abstract, {})
    assert found is not None
    assert np.array_equal(found[0]["x"], before)


def test_the_last_checkpoints_stay_and_an_unfinished_one_is_passed_over(tmp_path: Path) -> None:
    with TrainStore(tmp_path, keep=2) as store:
        assert store.latest is None
        for step in range(4):
            store.save(step, {"x": jnp.full(3, step)}, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdecimal()) == ["2", "3"]
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with TrainStore(tmp_path) as store:
        assert store.latest == 3
        store.save(4, {"x": jnp.full(3, 4)}, {"step": 4})
        store.wait()
        assert store.latest == 4


def test_another_model_s_checkpoint_is_refused_by_its_path(tmp_path: Path) -> None:
    with TrainStore(tmp_path) as store:
        store.save(3, {"x": jnp.ones(3)}, {})
        with pytest.raises(ValueError, match=r"3 does not hold this run's state"):
            store.restore(like({"y": jnp.ones(3)}), {})


def test_a_full_disk_is_counted_and_the_checkpoint_before_it_stays(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TrainStore(tmp_path) as store:
        store.save(1, {"x": jnp.ones(3)}, {})
        store.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            store.save(2, {"x": jax.random.normal(jax.random.key(0), (1 << 18,))}, {})
            store.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.failures == 1
        assert store.latest == 1
        store.save(3, {"x": jnp.ones(3)}, {})
    with TrainStore(tmp_path) as store:
        assert store.latest == 3


def test_the_best_checkpoint_stays_besides_the_last_and_is_known_again(tmp_path: Path) -> None:
    values = [0.2, None, 0.7, 0.7, 0.1, None, 0.3]
    with TrainStore(tmp_path, keep=2, best="reward") as store:
        assert store.best is None
        assert store.is_best(0.0)
        for step, value in enumerate(values):
            store.save(step, {"x": jnp.full(3, step)}, {"step": step}, value)
    with TrainStore(tmp_path, keep=2, best="reward") as store:
        assert store.steps == [3, 5, 6]
        assert (store.best, store.latest) == (3, 6)
        assert not store.is_best(0.7)
        assert not store.is_best(None)
        assert store.is_best(0.8)
        found = store.restore(like({"x": jnp.ones(3)}), {"step": 0}, step=store.best)
    assert found is not None
    assert found[1] == {"step": 3}
