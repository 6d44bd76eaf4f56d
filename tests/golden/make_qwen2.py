"""Record what transformers computes for the models in qwen2_cases.py, in float32 with eager attention.

Run where torch and transformers are: python tests/golden/make_qwen2.py
"""

from pathlib import Path

import numpy as np
import torch
from qwen2_cases import CASES, OFFSETS, TOKENS_BT, tensors
from transformers import AutoConfig, Qwen2ForCausalLM


def reference_model(raw: dict) -> Qwen2ForCausalLM:
    config = AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    model = Qwen2ForCausalLM(config).eval()
    weights = {name: torch.from_numpy(value) for name, value in tensors(raw).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


@torch.no_grad()
def outputs(raw: dict, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B,T,V], and what goes into each layer, [L,B,T,D]."""
    tokens = torch.from_numpy(TOKENS_BT)
    positions = torch.arange(offset, offset + tokens.shape[1])[None].expand_as(tokens)
    out = reference_model(raw)(tokens, position_ids=positions, output_hidden_states=True, use_cache=False)
    return out.logits.numpy(), torch.stack(out.hidden_states[:-1]).numpy()


def main() -> None:
    recorded = {}
    for name, raw in CASES.items():
        for offset in OFFSETS:
            recorded[f"{name}/logits/{offset}"], inputs = outputs(raw, offset)
            if offset == 0:
                recorded[f"{name}/layer_inputs"] = inputs
    np.savez_compressed(Path(__file__).with_name("qwen2.npz"), **recorded)


if __name__ == "__main__":
    main()
