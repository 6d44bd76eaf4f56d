"""The model computes what transformers computes, by recorded values and, where torch is installed, live."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import qwen2_cases
from golden.qwen2_cases import CASES, OFFSETS, TOKENS_BT
from parameters import golden_params

from memjax.models import qwen2
from memjax.models.attention import attend_segments
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.rope import rope_tables

OPTIONS = ModelOptions()
GOLDEN = Path(qwen2_cases.__file__).with_name("qwen2.npz")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as recorded:
        return dict(recorded)


def positions(offset):
    b, t = TOKENS_BT.shape
    return jnp.broadcast_to(offset + jnp.arange(t, dtype=jnp.int32), (b, t))


@partial(jax.jit, static_argnums=0)
def forward_to_logits(config, params, *inputs):
    return qwen2.logits(params, config, OPTIONS, qwen2.forward(params, config, OPTIONS, *inputs))


def logits(raw, offset):
    config, params = Qwen2Config.from_hf(raw), golden_params(raw)
    tokens, one = jnp.asarray(TOKENS_BT, jnp.int32), jnp.ones(TOKENS_BT.shape, jnp.int32)
    return forward_to_logits(config, params, tokens, positions(offset), one)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(golden, name, offset):
    # Angles are rounded in float32 alike but not identically; the difference grows with the position.
    atol = 1e-4 if offset == 0 else 1e-3
    np.testing.assert_allclose(logits(CASES[name], offset), golden[f"{name}/logits/{offset}"], atol=atol, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_each_layer_equals_transformers(golden, name):
    config = Qwen2Config.from_hf(CASES[name])
    model = qwen2.bind(golden_params(CASES[name]), config, OPTIONS)
    rope = rope_tables(config.rope, config.head_dim, positions(0))
    one = jnp.ones(TOKENS_BT.shape, jnp.int32)

    def attend(q, k, v, cache):
        return attend_segments(q, k, v, one, OPTIONS), cache

    inputs = golden[f"{name}/layer_inputs"]
    for i in range(config.num_hidden_layers - 1):
        output, _ = model.layers[str(i)](jnp.asarray(inputs[i]), rope, attend, None)
        np.testing.assert_allclose(output, inputs[i + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_live(name):
    pytest.importorskip("torch")
    from golden.make_qwen2 import outputs

    for offset in OFFSETS:
        expected, _ = outputs(CASES[name], offset)
        np.testing.assert_allclose(logits(CASES[name], offset), expected, atol=1e-3 if offset else 1e-4, rtol=0)
