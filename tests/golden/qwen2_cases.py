"""Tiny Qwen2 models whose outputs make_qwen2.py recorded. numpy only, so that both sides make the same weights."""

import numpy as np

OFFSETS = (0, 32_000, 100_000)
TOKENS_BT = np.random.default_rng(7).integers(0, 96, size=(2, 12))

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def _config(kv_heads: int, tied: bool, **rope) -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        **rope,
    }


CASES = {
    "kv1_tied_default": _config(1, True, rope_theta=1e6),
    "kv2_untied_yarn": _config(2, False, rope_theta=1e6, rope_scaling=YARN),
    "kv4_tied_yarn": _config(4, True, rope_parameters={"rope_theta": 1e4, **YARN}),
    "kv4_untied_default": _config(4, False, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
}


def tensors(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name. Norms and biases are random too: at ones and zeros they would hide mistakes."""
    rng = np.random.default_rng(seed)
    d, f, v = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    kv = d // raw["num_attention_heads"] * raw["num_key_value_heads"]
    layer = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
        "self_attn.o_proj.weight": (d, d),
    }
    for name, out in (("q_proj", d), ("k_proj", kv), ("v_proj", kv)):
        layer |= {f"self_attn.{name}.weight": (out, d), f"self_attn.{name}.bias": (out,)}
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    shapes |= {} if raw["tie_word_embeddings"] else {"lm_head.weight": (v, d)}
    for i in range(raw["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    made = {}
    for name in sorted(shapes):
        values = raw["initializer_range"] * rng.standard_normal(shapes[name])
        made[name] = (values + ("norm" in name)).astype(np.float32)
    return made
