"""memjax's update against the same in transformers + torch on one CPU core, and the memory of one on 8K tokens.

    python benchmarks/train_cpu.py --torch-python /path/to/venv/bin/python    # tokens per CPU second, and their ratio
    python benchmarks/train_cpu.py --memory                                   # peak memory of the 0.5B at 8,192 tokens

The update, in float32 on random weights of each shape: forward, the clipped token-mean loss of DAPO on the sampled
tokens, gradients of everything, clipping by global norm, AdamW. Neither side projects tokens that were not sampled to
the vocabulary, and neither recomputes activations. memjax runs the update of its training loop, metrics and entropy
included. Every side runs in a process of its own, pinned to one core, and is timed in CPU seconds, best of some.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    rows: int
    tokens: int  # of a row, of which the last quarter is sampled
    repeats: int


CASES = {"0.5B": Case(1, 512, 2), "tiny": Case(64, 72, 30)}
LONG = 8192
CLIP_LOW, CLIP_HIGH, RATE = 0.2, 0.28, 1e-6


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest run, a first one left out."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report(side: str, case: str, seconds: float) -> None:
    rate = CASES[case].rows * CASES[case].tokens / seconds
    print(json.dumps({"side": side, "case": case, "rate": rate, "peak": peak_gib()}), flush=True)


def measure_torch(case: str, config_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, length, repeats = CASES[case]
    config = AutoConfig.from_pretrained(config_path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    ids = torch.randint(0, config.vocab_size, (rows, length))
    first = length * 3 // 4
    advantages = torch.randn(rows, length - first)
    old: list[torch.Tensor] = []

    def update() -> None:
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, first - 1 : -1]
        logits = model.lm_head(hidden)
        logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, first:].flatten(), reduction="none")
        logprobs = logprobs.view(rows, -1)
        if not old:
            old.append(logprobs.detach())
        ratio = torch.exp(logprobs - old[0])
        clipped = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
        torch.maximum(-advantages * ratio, -advantages * clipped).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    report("torch", case, best_seconds(update, repeats))


def make_memjax_update(config_path: Path, rows: int, length: int, *, long: bool) -> tuple[Any, Any, Any]:
    """The jitted update, its abstract state and a batch."""
    from functools import partial

    import numpy as np

    from memjax.models.config import ModelOptions, Qwen2Config
    from memjax.train.logprobs import LogprobOptions, positions_at_once
    from memjax.train.losses import Batch, objective_loss
    from memjax.train.optimizer import OptimizerConfig
    from memjax.train.packing import Rows
    from memjax.train.presets import ObjectiveConfig
    from memjax.train.step import abstract_state, make_update

    shape = Qwen2Config.from_hf(json.loads((config_path / "config.json").read_text()))
    # Unrolled layers are not recomputed where the CPU compiler is concerned: it plans 31 GiB for 8,192 tokens.
    options = ModelOptions(remat=long, scan_layers=long)
    optimizer = OptimizerConfig(learning_rate=RATE, warmup_steps=0)
    objective = ObjectiveConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=None)
    loss = partial(objective_loss, objective)
    logprobs = LogprobOptions(shape.vocab_size, chunk=positions_at_once("cpu"))
    update = make_update(shape, options, logprobs, optimizer, loss)
    rng, where = np.random.default_rng(0), (1, rows, length)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), where)
    mask = positions >= length * 3 // 4
    tokens = rng.integers(0, shape.vocab_size, where).astype(np.int32)
    numbers = np.where(mask, rng.normal(size=where), 0).astype(np.float32)
    old = np.where(mask, -np.log(shape.vocab_size), 0).astype(np.float32)
    weights = (mask / mask.sum()).astype(np.float32)
    batch = Batch(Rows(tokens, positions, np.ones(where, np.int32), mask), old, old, 0 * old, numbers, weights)
    return update, abstract_state(shape, options, optimizer), (batch, shape, options, optimizer)


def fresh_state(shape: Any, options: Any, optimizer: Any) -> Any:
    import jax

    from memjax.models.qwen2 import init_params
    from memjax.train.step import init_state

    return init_state(init_params(shape, options, jax.random.key(0)), shape, options, optimizer)


def measure_memjax(case: str, config_path: Path) -> None:
    import jax

    rows, length, repeats = CASES[case]
    update, _, (batch, *parts) = make_memjax_update(config_path, rows, length, long=False)
    state = [fresh_state(*parts)]

    def run() -> None:
        state[0], metrics = update(state[0], batch)
        jax.block_until_ready((state[0], metrics))

    report("memjax", case, best_seconds(run, repeats))


def measure_memory(config_path: Path, step: bool) -> None:
    """What the compiler says that an update on LONG tokens needs, and what one takes."""
    update, state, (batch, *parts) = make_memjax_update(config_path, 1, LONG, long=True)
    memory = update.lower(state, batch).compile().memory_analysis()
    arguments, passing = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(
        f"0.5B, a row of {LONG} tokens, float32, layers scanned and recomputed: {arguments / 2**30:.2f} GiB of state, "
        f"{(passing + fresh) / 2**30:.2f} GiB passing, {(arguments + passing + fresh) / 2**30:.2f} GiB in all",
        flush=True,
    )
    if step:
        import jax

        state = fresh_state(*parts)
        start = time.process_time()
        state, metrics = update(state, batch)
        jax.block_until_ready(state)
        print(
            f"one step: {time.process_time() - start:.0f} CPU-s, loss {float(metrics['actor/loss']):.4f}, "
            f"peak {peak_gib():.2f} GiB resident",
            flush=True,
        )


def write_configs(directory: Path) -> None:
    """A config.json for each case, which both sides read."""
    from memjax.data import tiny
    from memjax.models.sizes import QWEN2_5

    for case, config in (("0.5B", QWEN2_5["0.5B"].to_hf()), ("tiny", tiny.model_config())):
        (directory / case).mkdir()
        (directory / case / "config.json").write_text(json.dumps(config))


def run_side(python: str, side: str, case: str, config_path: Path, core: int) -> dict[str, Any]:
    """One side and case in a process of its own on one core."""
    command = [python, __file__, "--side", side, "--case", case, "--configs", str(config_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    pin = ["taskset", "-c", str(core)]
    output = subprocess.run([*pin, *command], stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    measured = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    print(f"  {side:7}{case:6}{measured['rate']:9.1f} tokens / CPU-s, peak {measured['peak']:.2f} GiB", file=sys.stderr)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--memory", action="store_true", help="measure the memory of one long update instead")
    parser.add_argument("--no-step", action="store_true", help="with --memory: ask the compiler only")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--core", type=int, default=0, help="the core that both sides are pinned to")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--configs", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        {"torch": measure_torch, "memjax": measure_memjax}[given.side](given.case, given.configs / given.case)
        return
    with tempfile.TemporaryDirectory() as directory:
        configs = Path(directory)
        write_configs(configs)
        if given.memory:
            measure_memory(configs / "0.5B", step=not given.no_step)
            return
        if not given.torch_python:
            parser.error("--torch-python is needed: the ratio is the result")
        print("| case | memjax | torch | ratio |\n|---|---|---|---|")
        for case in given.cases:
            ours = run_side(sys.executable, "memjax", case, configs, given.core)["rate"]
            theirs = run_side(given.torch_python, "torch", case, configs, given.core)["rate"]
            rows, length, _ = CASES[case]
            print(f"| {case}, {rows} x {length} tokens | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
