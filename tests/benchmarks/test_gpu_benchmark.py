"""The GPU benchmark runs, at tiny sizes on this CPU, with the four packages that it asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Everything of memjax's own dependencies that jax, flax and optax do not bring along.
_ABSENT = ("pydantic", "jaxtyping", "transformers", "tokenizers", "typer", "httpx", "safetensors", "gguf", "jetstream")
_RUN = f"""
import runpy, sys
sys.modules |= dict.fromkeys({_ABSENT})
sys.argv = ["gpu.py", "--tiny"]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_gpu_benchmark_needs_jax_flax_optax_and_numpy_alone() -> None:
    found = subprocess.run([sys.executable, "-c", _RUN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for measured in ("prefill of 128 tokens", "decode of 4 slots", "document tokens/s", "train step, 2 rows"):
        assert measured in found.stdout
