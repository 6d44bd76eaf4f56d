"""memjax against transformers + torch on one CPU core: prefill and decode of a real Qwen2.5, in one run, as ratios.

    uv run python benchmarks/qwen_cpu.py MODEL_DIR --torch-python /path/to/venv/bin/python

MODEL_DIR is a Hugging Face directory (`memjax convert model.gguf DIR`). Every side runs in its own process pinned to
one core and is timed in CPU seconds (`process_time`), best of three (two for 6144 tokens), so that a busy neighbour
does not decide the result. memjax is measured through its engine (sampling, logprobs and termination included); torch
through `model(...)` with sdpa attention, its dynamic cache and an argmax.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

PREFILL = (512, 2048, 6144)
DECODE = (1, 8, 32)
CONTEXT = 256  # tokens in the cache before the timed decode steps
STEPS = 16
REPEATS = 3
LONG_REPEATS = 2  # of 6144 tokens and more, which take minutes


def best_seconds(run: Callable[[], None], repeats: int = REPEATS) -> float:
    """CPU seconds of the fastest of some runs; the first, which may compile, loses."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def repeats(length: int) -> int:
    return REPEATS if length < 6144 else LONG_REPEATS


def report(**measurement: float | str) -> None:
    print(json.dumps(measurement), flush=True)


def measure_torch(model_dir: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    side = f"torch {dtype}"

    @torch.inference_mode()
    def prefill(length: int, rows: int = 1):
        ids = torch.randint(0, 150_000, (rows, length), generator=torch.Generator().manual_seed(0))
        return model(ids, use_cache=True, logits_to_keep=1)

    for length in PREFILL:
        report(
            side=side,
            case=f"prefill {length}",
            rate=length / best_seconds(lambda n=length: prefill(n), repeats(length)),
        )

    for rows in DECODE:
        state = prefill(CONTEXT, rows)

        @torch.inference_mode()
        def decode(state=state) -> float:
            cache, token = state.past_key_values, state.logits[:, -1:].argmax(-1)
            start = time.process_time()
            for _ in range(STEPS):
                token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            seconds = time.process_time() - start
            cache.crop(-STEPS)  # what this run has added
            return seconds

        report(side=side, case=f"decode {rows}", rate=rows * STEPS / min(decode() for _ in range(REPEATS)))


def run_side(python: str, side: str, model_dir: str, core: int) -> dict[tuple[str, str], float]:
    """Measure one side in a process of its own on one core; tokens per CPU second by (side, case)."""
    command = [python, __file__, model_dir, "--side", side]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    assert process.stdout is not None
    rates = {}
    for line in process.stdout:
        if line.startswith("{"):
            measured = json.loads(line)
            rates[measured["side"], measured["case"]] = measured["rate"]
            print(
                f"  {measured['side']:16} {measured['case']:14} {measured['rate']:8.1f} tokens / CPU-s", file=sys.stderr
            )
    if process.wait() != 0:
        raise SystemExit(f"{side}: the measuring process ended with {process.returncode}")
    return rates


def measure_memjax(model_dir: str, dtype: str) -> None:
    import jax.numpy as jnp
    import numpy as np

    from memjax.checkpoint import load_model
    from memjax.mesh import make_mesh
    from memjax.models.config import ModelOptions
    from memjax.rollout.local import make_engine
    from memjax.rollout.shapes import EngineConfig
    from memjax.sharding import ROLLOUT, Layout
    from memjax.trajectory import SamplingParams

    ids = np.random.default_rng(0).integers(0, 150_000, max(PREFILL)).astype(np.int32)
    side = f"memjax {dtype}"

    layout = Layout(make_mesh(), ROLLOUT)
    options = ModelOptions(param_dtype=getattr(jnp, dtype), compute_dtype=jnp.float32, scan_layers=False, layout=layout)
    loaded = load_model(model_dir, options)  # once: every engine below stands on these weights

    def engine_of(slots: int, max_length: int):
        return make_engine(loaded, EngineConfig.for_platform("cpu", max_length, slots))

    engine = engine_of(1, max(PREFILL))
    weights = engine.load_params()
    for length in PREFILL:

        def prefill(length=length) -> None:
            prefix = engine.prefill(params=weights, padded_tokens=ids[:length], true_length=length)
            prefix.cache[0].k.block_until_ready()

        report(side=side, case=f"prefill {length}", rate=length / best_seconds(prefill, repeats(length)))

    greedy = SamplingParams(max_tokens=CONTEXT, temperature=0.0)
    for rows in DECODE:
        engine = engine_of(rows, 2 * CONTEXT)
        weights = engine.load_params()
        prefix = engine.prefill(params=weights, padded_tokens=ids[:CONTEXT], true_length=CONTEXT)

        def decode(engine=engine, weights=weights, prefix=prefix, rows=rows) -> float:
            # Inserting is the price of a slot, not of a step: it stays outside of what is timed.
            state = engine.init_decode_state()
            for slot in range(rows):
                state = engine.insert(prefix, state, slot, sampling=greedy)
            state, drawn = engine.generate(weights, state)
            drawn.convert_to_numpy()
            start = time.process_time()
            for _ in range(STEPS):
                state, drawn = engine.generate(weights, state)
                drawn.convert_to_numpy()
            return time.process_time() - start

        report(side=side, case=f"decode {rows}", rate=rows * STEPS / min(decode() for _ in range(REPEATS)))


def table(rates: dict[tuple[str, str], float]) -> str:
    """A Markdown table: memjax's rate in each dtype, and its ratio to each of torch's."""
    sides = sorted({side for side, _ in rates})
    ours = [side for side in sides if side.startswith("memjax")]
    theirs = [side for side in sides if side.startswith("torch")]
    heads = ["case", *sides, *(f"{our} / {their}" for our in ours for their in theirs)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for case in [f"prefill {n}" for n in PREFILL] + [f"decode {n}" for n in DECODE]:
        cells = [f"{rates[side, case]:.1f}" for side in sides]
        cells += [f"{rates[our, case] / rates[their, case]:.2f}" for our in ours for their in theirs]
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--core", type=int, default=0, help="the core that every side is pinned to")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        library, dtype = arguments.side.split()
        {"torch": measure_torch, "memjax": measure_memjax}[library](arguments.model_dir, dtype)
        return
    if not arguments.torch_python:
        parser.error("--torch-python is needed: the ratio is the result")
    rates = {}
    for side in ("memjax float32", "torch float32", "memjax bfloat16", "torch bfloat16"):
        python = sys.executable if side.startswith("memjax") else arguments.torch_python
        rates |= run_side(python, side, arguments.model_dir, arguments.core)
    print(table(rates))


if __name__ == "__main__":
    main()
