import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from memjax.train.optimizer import OptimizerConfig, clip_by_norm, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"warmup_steps": 0}, [1, 1, 1, 1, 1, 1]),
        (
            {"warmup_steps": 1, "schedule": "cosine", "decay_steps": 5, "final_fraction": 0.2},
            [1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2],
        ),
    ],
)
def test_rates_are_those_worked_by_hand(fields, rates):
    rate = learning_rate(OptimizerConfig(learning_rate=0.1, **fields))
    np.testing.assert_allclose([10 * rate(step) for step in range(len(rates))], rates, atol=1e-6)


PARAMS = {
    "embed_tokens": {"weight": jnp.ones((3, 2))},
    "layers": {
        "q_proj": {"weight": jnp.ones((2, 2, 2)), "bias": jnp.ones((2, 2))},
        "norm": {"weight": jnp.ones((2, 2))},
    },
}


def first_update(gradient: float, **fields):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, **fields))
    grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), PARAMS)
    return jax.jit(lambda: optimizer.update(grads, optimizer.init(PARAMS), PARAMS)[0])()


def test_only_matrices_decay():
    updates = first_update(0.0, weight_decay=0.5)
    assert float(updates["embed_tokens"]["weight"][0, 0]) == pytest.approx(-0.05)
    assert float(updates["layers"]["q_proj"]["weight"][0, 0, 0]) == pytest.approx(-0.05)
    assert not updates["layers"]["q_proj"]["bias"].any()
    assert not updates["layers"]["norm"]["weight"].any()


def test_the_first_update_is_the_rate_in_the_direction_of_the_gradient():
    updates = first_update(1e-3, weight_decay=0.0)
    np.testing.assert_allclose(updates["embed_tokens"]["weight"], -0.1, rtol=1e-3)


@pytest.mark.parametrize(("gradient", "norm_after"), [(0.0, 0.0), (0.01, 0.05), (3.0, 0.5)])
def test_only_gradients_above_the_limit_are_scaled_to_it(gradient, norm_after):
    grads = {"a": jnp.full((4, 4), gradient), "b": jnp.full(9, -gradient)}
    clipped = jax.jit(lambda grads: clip_by_norm(grads, optax.tree.norm(grads), 0.5))(grads)
    assert float(optax.tree.norm(clipped)) == pytest.approx(norm_after)
    np.testing.assert_allclose(clipped["b"], -clipped["a"].reshape(-1)[:9])


@pytest.mark.parametrize(
    ("field", "value"),
    [("beta1", 0.5), ("beta2", 0.5), ("eps", 1.0), ("weight_decay", 0.5), ("learning_rate", 0.2)],
)
def test_every_field_of_the_optimizer_changes_the_second_update(field, value):
    def second(**fields):
        optimizer = make_optimizer(OptimizerConfig(**({"learning_rate": 0.1, "warmup_steps": 0} | fields)))
        params = PARAMS["embed_tokens"]

        def run():
            state = optimizer.init(params)
            for gradient in (np.full((3, 2), 0.01), np.array([[1.0, -1], [2, 0.1], [0, 0.3]])):
                updates, state = optimizer.update({"weight": jnp.float32(gradient)}, state, params)
            return updates["weight"]

        return jax.jit(run)()

    assert np.abs(second() - second(**{field: value})).max() > 1e-6


def test_a_cosine_without_an_end_is_refused():
    with pytest.raises(ValidationError, match="decay_steps"):
        OptimizerConfig(schedule="cosine")
