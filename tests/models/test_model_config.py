"""Reading and writing config.json, and what is refused."""

from dataclasses import replace

import pytest
from golden.qwen2_cases import CASES, YARN
from transformers import AutoConfig

from memjax.models.config import Qwen2Config
from memjax.models.rope import RopeConfig

RAW = CASES["kv2_untied_yarn"]


@pytest.mark.parametrize("name", CASES)
def test_writing_and_reading_is_the_identity(name):
    config = replace(Qwen2Config.from_hf(CASES[name]), eos_token_id=(3, 4), pad_token_id=4)
    written = config.to_hf()
    assert Qwen2Config.from_hf(written) == config
    assert "rope_parameters" not in written  # one place for one setting: transformers 4 and 5 both read this one
    theirs = {"rope_parameters": {"rope_theta": written["rope_theta"], **(written["rope_scaling"] or {})}}
    assert Qwen2Config.from_hf(written | {"rope_theta": None, "rope_scaling": None} | theirs) == config


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_same_rope(name):
    config = Qwen2Config.from_hf(CASES[name])
    read = AutoConfig.for_model(**config.to_hf()).rope_parameters
    assert (read["rope_theta"], read["rope_type"]) == (config.rope.theta, config.rope.kind)
    if config.rope.kind == "yarn":
        assert (read["factor"], read["original_max_position_embeddings"]) == (4.0, 32_768)
    assert Qwen2Config.from_hf(AutoConfig.for_model(**config.to_hf()).to_dict() | {"architectures": None}) == config


def test_yarn_without_a_factor_or_an_original_length_takes_them_from_the_window():
    without_factor = RAW | {"rope_scaling": YARN | {"factor": None}}
    assert Qwen2Config.from_hf(without_factor).rope.factor == 131_072 / 32_768
    without_original = RAW | {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    assert Qwen2Config.from_hf(without_original).rope.original_max_position_embeddings == 131_072


def test_rope_defaults_to_transformers_own():
    plain = {key: value for key, value in RAW.items() if not key.startswith("rope")}
    assert Qwen2Config.from_hf(plain).rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        Qwen2Config.from_hf(RAW | change)
