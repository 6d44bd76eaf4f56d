"""Logits of a real Qwen2 in memjax against transformers + torch, in float32.

python benchmarks/parity_real.py MODEL --torch-python /path/to/python

MODEL is a Hugging Face directory with float32 weights (`memjax convert model.gguf DIR --dtype float32`); the other
python needs torch and transformers. Prints a table and exits 1 where |difference| > 1e-3 or an argmax differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from memjax.checkpoint import load_model
from memjax.models.config import ModelOptions
from memjax.models.qwen2 import forward, logits
from memjax.rollout.client import Message

QUESTIONS = (
    "Who wrote Pride and Prejudice?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "白鲸的船长叫什么名字？",
    "List three primary colours, then count from 1 to 10.",
)
TOLERANCE = 1e-3

TORCH_SIDE = """
import sys
import numpy as np
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
logits = {}
with torch.no_grad():
    for name, ids in np.load(sys.argv[2]).items():
        logits[name] = model(torch.tensor(ids[None]).long()).logits[0].numpy()
np.savez(sys.argv[3], **logits)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--torch-python", default=sys.executable)
    arguments = parser.parse_args()

    options = ModelOptions()
    model = load_model(arguments.model, options)
    prompts = {
        f"prompt {i}": np.array(model.tokenizer.render([Message("user", (question,))]), np.int32)
        for i, question in enumerate(QUESTIONS)
    }
    theirs = torch_logits(arguments.model, prompts, arguments.torch_python)

    @jax.jit
    def run(params: dict, tokens_BT: jax.Array) -> jax.Array:
        positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        hidden_BTD = forward(params, model.config, options, tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
        return logits(params, model.config, options, hidden_BTD)[0]

    print("| prompt | tokens | largest logit | largest difference | argmax equal |\n|---|---|---|---|---|")
    worst, agree = 0.0, True
    for (name, ids), question in zip(prompts.items(), QUESTIONS, strict=True):
        ours_TV, theirs_TV = np.asarray(run(model.params, ids[None])), theirs[name]
        difference = np.abs(ours_TV - theirs_TV).max()
        equal = (ours_TV.argmax(-1) == theirs_TV.argmax(-1)).mean()
        print(f"| {question} | {len(ids)} | {np.abs(theirs_TV).max():.1f} | {difference:.1e} | {equal:.0%} |")
        worst, agree = max(worst, float(difference)), agree and equal == 1
    return 0 if worst <= TOLERANCE and agree else 1


def torch_logits(model: Path, prompts: dict[str, np.ndarray], python: str) -> dict[str, np.ndarray]:
    """Logits of every position, [T, V] a prompt, from the other python."""
    with tempfile.TemporaryDirectory() as directory:
        given, made = Path(directory) / "prompts.npz", Path(directory) / "logits.npz"
        np.savez(given, **prompts)  # type: ignore[arg-type]
        subprocess.run([python, "-c", TORCH_SIDE, model, given, made], check=True)
        with np.load(made) as arrays:
            return dict(arrays)


if __name__ == "__main__":
    sys.exit(main())
