"""One call loads every kind of model, and one converts it into a directory."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from memjax.checkpoint import convert, load_model
from memjax.tokenizer_files import read_json, write_json
from tests.tiny_model import tiny_config, tiny_weights, write_tiny_model


def test_a_directory_becomes_a_model(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path))
    assert model.config == tiny_config()
    assert model.source == tmp_path
    assert model.tokenizer.eos_ids == (273, 271)
    np.testing.assert_array_equal(model.params["norm"]["weight"], tiny_weights(model.config)["model.norm.weight"])


def test_a_conversion_is_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "in")
    held = load_model(source).params
    convert(source, tmp_path / "deeper" / "out")
    converted = load_model(tmp_path / "deeper" / "out").params
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32), held)
    jax.tree.map(np.testing.assert_array_equal, converted, rounded)
    convert(str(source), str(tmp_path / "deeper" / "out"), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "deeper" / "out").params, held)


def test_a_conversion_onto_its_source_or_onto_something_else_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "in")
    with pytest.raises(ValueError, match="is the model that is to be converted"):
        convert(source, tmp_path / "other" / ".." / "in")
    other = write_tiny_model(tmp_path / "other")
    with pytest.raises(ValueError, match="holds something that memjax did not export"):
        convert(source, other)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tiny_config(vocab_size=275))
    with pytest.raises(ValueError, match="has 276 ids, but the model only 275"):
        load_model(tmp_path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    write_json(tmp_path / "config.json", (read_json(tmp_path / "config.json") or {}) | {"model_type": "mamba"})
    with pytest.raises(ValueError, match=r"config\.json: model_type is 'mamba'"):
        load_model(tmp_path)


def test_a_model_that_is_not_here_and_cannot_be_fetched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path of a downloaded model"):
        load_model("nobody/nothing-that-is-cached")
    with pytest.raises(ValueError, match=r"give a directory, a \.gguf file or a Hugging Face id"):
        load_model(tmp_path / "absent.gguf")
