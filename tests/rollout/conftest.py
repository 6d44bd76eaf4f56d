"""A tiny model, an engine over it, and the full forward that everything the engine says is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.checkpoint import LoadedModel, load_model
from memjax.models import qwen2
from memjax.rollout.engine import Engine, EngineConfig
from memjax.rollout.local import make_engine
from tests.tiny_model import write_tiny_model

MAX_LENGTH = 96

Teacher = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def loaded(model_directory) -> LoadedModel:
    return load_model(model_directory)


@pytest.fixture(scope="session")
def engine(loaded) -> Engine:
    """Four slots, a ladder of three lengths; programs are compiled as tests need them."""
    return make_engine(loaded, EngineConfig(slots=4, max_length=MAX_LENGTH, prefill_buckets=(8, 16)))


@pytest.fixture(scope="session")
def teacher(loaded) -> Teacher:
    """The log probabilities of `tokens` after `prompt`, from one full forward."""

    @jax.jit
    def logits(params, ids_BT):
        positions_BT = jnp.arange(MAX_LENGTH, dtype=jnp.int32)[None]
        hidden_BTD = qwen2.forward(params, loaded.config, loaded.options, ids_BT, positions_BT, jnp.ones_like(ids_BT))
        return qwen2.logits(params, loaded.config, loaded.options, hidden_BTD)[0, :, : loaded.tokenizer.size]

    def logprobs(prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0, params=None) -> np.ndarray:
        ids = np.asarray([*prompt, *tokens], np.int32)
        padded_BT = np.pad(ids, (0, MAX_LENGTH - len(ids)))[None]
        logits_TV = logits(loaded.params if params is None else params, padded_BT) / (temperature or 1.0)
        places = np.arange(len(prompt) - 1, len(ids) - 1)
        return np.asarray(jax.nn.log_softmax(logits_TV))[places, list(tokens)]

    return logprobs
