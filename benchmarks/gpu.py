"""One GPU, random weights in bfloat16: prefill and decode of a 7B, the rate at which it reads, a train step of a 1.5B.

    benchmarks/gpu.sh            # or: python benchmarks/gpu.py

Needs jax, flax, optax and numpy beside this source tree, nothing else: where jaxtyping is missing, its annotations are
left empty. About five minutes on an H100, most of them compiling. `--tiny` runs everything at sizes for a CPU.

Wall seconds of the best of three runs after one that compiles. Model FLOPs utilisation counts what the mathematics
needs (2 operations for each weight and token forward, 6 with the gradients, and causal attention; nothing for what is
recomputed), over the dense bfloat16 peak of the data sheet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def leave_annotations_empty() -> None:
    """Stand in for jaxtyping, of which only names in annotations are used."""

    class Anything:
        def __class_getitem__(cls, _: object) -> type:
            return cls

    module: Any = ModuleType("jaxtyping")
    module.__getattr__ = lambda name: Anything
    sys.modules["jaxtyping"] = module


if find_spec("jaxtyping") is None:
    leave_annotations_empty()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from memjax.models import kv_cache, qwen2  # noqa: E402
from memjax.models.attention import choose_body  # noqa: E402
from memjax.models.config import ModelOptions, Qwen2Config  # noqa: E402
from memjax.models.sizes import QWEN2_5  # noqa: E402
from memjax.plan.hardware import CHIPS  # noqa: E402
from memjax.rollout.sampling import sample  # noqa: E402
from memjax.train.logprobs import LogprobOptions, token_logprobs  # noqa: E402

REPEATS = 3


@dataclass(frozen=True)
class Case:
    """What is run. Lengths are in tokens."""

    reader: Qwen2Config
    learner: Qwen2Config
    piece: int  # of a prompt that is prefilled at a time
    prompt: int
    slots: int
    chunk: int  # document in a prompt
    memory: int  # written after each
    row: int  # of the train step
    rows: int


FULL = Case(QWEN2_5["7B"], QWEN2_5["1.5B"], 2048, 6144, 64, 5000, 512, 8192, 2)
_SMALL = Qwen2Config(512, 64, 128, 2, 4, 2, 16)
TINY = Case(_SMALL, _SMALL, 64, 128, 4, 100, 16, 128, 2)


def best(run: Callable[[], Any]) -> float:
    """Wall seconds of the fastest run, the first, which compiles, left out."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def matrices(shape: Qwen2Config) -> int:
    """Weights of all layers' matrices."""
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    layer = shape.hidden_size * (heads * shape.head_dim + 3 * shape.intermediate_size)
    return shape.num_hidden_layers * layer


def forward_flops(shape: Qwen2Config, tokens: int, context: float) -> float:
    """Of the layers for tokens that see `context` others on average."""
    attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * context
    return tokens * (2 * matrices(shape) + attention)


def peak_flops() -> float | None:
    """The data sheet's peak of this device; None if it is not listed."""
    kind = jax.devices()[0].device_kind.lower()
    return next((chip.flops for name, chip in CHIPS.items() if name in kind), None)


def say(name: str, value: str, used: float | None = None) -> None:
    utilisation = f"   {used:6.1%} of peak" if used is not None else ""
    print(f"{name:<52}{value:>22}{utilisation}", flush=True)


def share(flops: float, seconds: float, peak: float | None) -> float | None:
    return flops / seconds / peak if peak else None


def measure_reading(case: Case, peak: float | None) -> None:
    """Prefill of one prompt in pieces, decode of all slots, and what they make of a document."""
    shape, options = case.reader, ModelOptions(jnp.bfloat16, jnp.bfloat16, scan_layers=True)
    say("attention of the prefill", choose_body(options, case.piece, case.prompt, shape.head_dim))
    params = qwen2.init_params(shape, options, jax.random.key(0))
    length = case.prompt + case.memory

    @partial(jax.jit, donate_argnums=1, static_argnums=4)
    def extend(params, cache, tokens_BT, start_B, window):
        return qwen2.forward_cached(params, shape, options, tokens_BT, start_B, cache, window)[1]

    piece_BT = jnp.ones((1, case.piece), jnp.int32)
    held = {"cache": kv_cache.init_cache(shape, options, 1, case.prompt)}

    def prefill() -> Any:
        for start in range(0, case.prompt, case.piece):
            start_B = jnp.full(1, start, jnp.int32)
            held["cache"] = extend(params, held["cache"], piece_BT, start_B, start + case.piece)
        return held["cache"]

    prefill_seconds = best(prefill)
    flops = forward_flops(shape, case.prompt, case.prompt / 2)
    say(
        f"prefill of {case.prompt} tokens, pieces of {case.piece}",
        f"{case.prompt / prefill_seconds:,.0f} tokens/s",
        share(flops, prefill_seconds, peak),
    )
    del held["cache"]

    @partial(jax.jit, donate_argnums=1)
    def step(params, cache, token_B, start_B):
        hidden, cache = qwen2.forward_cached(params, shape, options, token_B[:, None], start_B, cache, length)
        keys = jax.random.key_data(jax.random.split(jax.random.key(0), case.slots))
        ones = jnp.ones(case.slots)
        logits = qwen2.logits(params, shape, options, hidden[:, 0])
        token_B, _ = sample(logits, keys, ones, jnp.zeros(case.slots, jnp.int32), ones, shape.vocab_size)
        return token_B, cache

    state = [jnp.ones(case.slots, jnp.int32), kv_cache.init_cache(shape, options, case.slots, length)]
    start_B = jnp.full(case.slots, length - 1, jnp.int32)
    steps = 8

    def decode() -> Any:
        for _ in range(steps):
            state[0], state[1] = step(params, state[1], state[0], start_B)
        return state[0]

    decode_seconds = best(decode) / steps
    flops = forward_flops(shape, case.slots, length) + 2 * case.slots * shape.vocab_size * shape.hidden_size
    say(
        f"decode of {case.slots} slots at {length} tokens each",
        f"{case.slots / decode_seconds:,.0f} tokens/s",
        share(flops, decode_seconds, peak),
    )
    turn = case.slots * prefill_seconds + case.memory * decode_seconds
    say(
        f"reading: chunks of {case.chunk}, memories of {case.memory}, all slots",
        f"{case.slots * case.chunk / turn:,.0f} document tokens/s",
    )


def measure_learning(case: Case, peak: float | None) -> None:
    """One update: the token mean of the clipped loss, gradients through every layer, AdamW on float32 weights."""
    shape = case.learner
    options = ModelOptions(jnp.float32, jnp.bfloat16, scan_layers=True, remat=True)
    say("attention of the train step", choose_body(options, case.row, case.row, shape.head_dim))
    transform = optax.adamw(1e-6)
    tokens_BT = jax.random.randint(jax.random.key(1), (case.rows, case.row), 0, shape.vocab_size)
    positions_BT = jnp.broadcast_to(jnp.arange(case.row, dtype=jnp.int32), tokens_BT.shape)
    mask_BT = positions_BT >= case.row * 7 // 8  # what a memory agent samples of what it reads

    def loss(params):
        params = jax.tree.map(lambda x: x.astype(options.compute_dtype), params)
        hidden_BTD = qwen2.forward(params, shape, options, tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
        head_VD = params["embed_tokens" if shape.tie_word_embeddings else "lm_head"]["weight"]
        found_BT, _ = token_logprobs(hidden_BTD, head_VD, tokens_BT, mask_BT, LogprobOptions(shape.vocab_size))
        ratio_BT = jnp.exp(found_BT - jax.lax.stop_gradient(found_BT))
        clipped_BT = jnp.clip(ratio_BT, 0.8, 1.28)
        return -jnp.sum(jnp.where(mask_BT, jnp.minimum(ratio_BT, clipped_BT), 0.0)) / mask_BT.sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state):
        changes, opt_state = transform.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    params = qwen2.init_params(shape, options, jax.random.key(0))
    state = [params, jax.jit(transform.init)(params)]
    del params

    def run() -> Any:
        state[0], state[1] = update(*state)
        return state[0]

    seconds = best(run)
    tokens, sampled = tokens_BT.size, int(mask_BT.sum())
    projected = 2 * sampled * shape.vocab_size * shape.hidden_size
    flops = 3 * (forward_flops(shape, tokens, case.row / 2) + projected)
    say(
        f"train step, {case.rows} rows of {case.row} tokens",
        f"{tokens / seconds:,.0f} tokens/s",
        share(flops, seconds, peak),
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    case = TINY if parser.parse_args(words).tiny else FULL
    device, peak = jax.devices()[0], peak_flops()
    print(f"{device.device_kind}, jax {jax.__version__}, peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'not known'}")
    measure_reading(case, peak)
    measure_learning(case, peak)


if __name__ == "__main__":
    main()
