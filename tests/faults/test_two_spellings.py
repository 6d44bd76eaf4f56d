"""A setting that a config may spell in two places: what agrees is read, whichever says it; what differs is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from memjax.checkpoint import load_model
from memjax.models.config import Qwen2Config
from tests.tiny_model import tiny_config, write_tiny_model

PLAIN = tiny_config().to_hf() | {"rope_theta": None, "rope_scaling": None, "dtype": None}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
_DTYPES = ("float32", "bfloat16", "torch.bfloat16", None)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[dict[str, Any], float, bool]:
    """A config with theta and perhaps YaRN spelled in some of the places, and what it means."""
    theta, stretched = draw(st.sampled_from([10_000.0, 1e6])), draw(st.booleans())
    type_keys = st.sampled_from([("type",), ("rope_type",), ("type", "rope_type")])
    kinds = draw(st.sampled_from([("yarn", None), ("yarn", "default"), ("yarn", "yarn")]) if stretched
                 else st.sampled_from([(None, None), ("default", None), ("default", "default")]))  # fmt: skip
    places: list[dict[str, Any]] = []
    for kind in draw(st.permutations(kinds)):
        place: dict[str, Any] = dict.fromkeys(draw(type_keys), kind) if kind else {}
        place |= YARN | {"factor": draw(st.sampled_from([4, 4.0, "4.0"]))} if kind == "yarn" else {}
        places.append(place)
    raw: dict[str, Any] = {**PLAIN, "rope_scaling": places[0] or None}
    where = draw(st.sets(st.sampled_from(["top", "scaling", "parameters"]), min_size=1))
    raw |= {"rope_theta": theta} if "top" in where else {}
    if "parameters" in where:
        places[1]["rope_theta"] = theta
    if "scaling" in where:
        raw["rope_scaling"] = {**(raw["rope_scaling"] or {}), "rope_theta": theta}
    nested = places[1] and draw(st.booleans())
    raw["rope_parameters"] = ({"full_attention": places[1]} if nested else places[1]) or None
    return raw, theta, stretched


@settings(max_examples=80, deadline=None)
@given(spellings())
def test_one_meaning_is_one_config_wherever_it_is_spelled(case: tuple[dict[str, Any], float, bool]) -> None:
    raw, theta, stretched = case
    read = Qwen2Config.from_hf(raw)
    plain = PLAIN | {"rope_theta": theta, "rope_scaling": {"type": "yarn", **YARN} if stretched else None}
    assert read == Qwen2Config.from_hf(plain)
    assert (read.rope.theta, read.rope.kind) == (theta, "yarn" if stretched else "default")
    assert Qwen2Config.from_hf(read.to_hf()) == read
    theirs = AutoConfig.for_model(**read.to_hf()).rope_parameters  # of what is written: raw has traps for them
    assert (theirs["rope_theta"], theirs["rope_type"]) == (theta, read.rope.kind)
    if stretched:
        assert theirs["factor"] == 4.0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "attention_factor"]),
    st.sampled_from([(2.0, 4.0), (3.0, 2.0)]),
    st.booleans(),
)
def test_what_disagrees_is_refused_with_both_values(name: str, values: tuple[float, float], nested: bool) -> None:
    one, other = ({"rope_type": "yarn", **YARN, name: value} for value in values)
    raw = PLAIN | {"rope_scaling": one, "rope_parameters": {"full_attention": other} if nested else other}
    with pytest.raises(ValueError, match=r"keep one of them") as refused:
        Qwen2Config.from_hf(raw)
    assert all(f"{name} is {value:g}" in str(refused.value).replace(".0", "") for value in values)


@pytest.mark.parametrize("one", _DTYPES)
@pytest.mark.parametrize("other", _DTYPES)
def test_two_dtypes_are_one_or_refused(one: str | None, other: str | None) -> None:
    raw = PLAIN | {"dtype": one, "torch_dtype": other}
    names = {name.removeprefix("torch.") for name in (one, other) if name}
    if len(names) < 2:
        assert Qwen2Config.from_hf(raw) == Qwen2Config.from_hf(PLAIN)
    else:
        with pytest.raises(ValueError, match=r"^dtype is '\w+', but torch_dtype is '\w+'"):
            Qwen2Config.from_hf(raw)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "new_key": 1}}, r"rope_parameters\.new_key is 1"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", **YARN}}, r"'linear', but .*type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope type is 'linear'"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, r"'default', but rope_scaling\.factor is 2"),
        ({"rope_scaling": {"factor": 2.0}}, r"no rope_type"),
        ({"rope_scaling": {"type": "yarn", "factor": "four"}}, r"rope_scaling\.factor is 'four'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            r"differs between layers",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Qwen2Config.from_hf(PLAIN | change)


def test_linear_scaling_by_one_is_none() -> None:
    raw = PLAIN | {"rope_scaling": {"type": "linear", "factor": 1.0}}
    assert Qwen2Config.from_hf(raw) == Qwen2Config.from_hf(PLAIN)


def test_a_head_beside_a_tied_embedding_must_be_the_embedding(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, file)
    load_model(tmp_path / "model")
    save_file(tensors | {"lm_head.weight": np.roll(embedding, 1, axis=0).copy()}, file)
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but .* lm_head\.weight"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    file = write_tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"NaN or infinity in model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path / "model")


def test_an_index_that_joined_shards_left_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_tiny_model(tmp_path / "model")
    stale = '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(stale)
    load_model(directory)
    assert "passed over" in caplog.text
