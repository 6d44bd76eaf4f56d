"""Compile the 7B and 14B for TPU slices without a TPU, and say what each device would have to hold.

Needs libtpu (`pip install "jax[tpu]"`), no TPU:  python benchmarks/tpu_aot.py [--sizes 7B] [--topologies v5e:2x4]
"""

from __future__ import annotations

import argparse
import math
import os
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from memjax.mesh import make_mesh
from memjax.models import kv_cache, qwen2
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.rope import RopeConfig
from memjax.sharding import ROLLOUT, Layout

ROPE = RopeConfig(theta=1e6)
SIZES = {
    "7B": Qwen2Config(152_064, 3584, 18_944, 28, 28, 4, 128, rope=ROPE),
    "14B": Qwen2Config(152_064, 5120, 13_824, 48, 40, 8, 128, rope=ROPE),
}
TOPOLOGIES = {"v5e:2x4": 16, "v5p:2x2x1": 95}  # GB of HBM per device
PROMPT = 8192
SLOTS = 64


def rollout_options(topology: str) -> ModelOptions:
    """bfloat16, scanned, split over four devices by tensor: the most that 28 query heads and 4 kv heads divide into."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    layout = Layout(make_mesh(data=-1, tensor=4, devices=devices), ROLLOUT)
    return ModelOptions(jnp.bfloat16, jnp.bfloat16, scan_layers=True, layout=layout)


def compile_step(
    config: Qwen2Config, options: ModelOptions, batch: int, tokens: int, length: int
) -> jax.stages.Compiled:
    """One prefill (tokens > 1) or decode step over a cache of `length`, logits of the last position included."""
    assert options.layout

    def step(params, tokens_BT, start_B, cache):
        hidden_BTD, cache = qwen2.forward_cached(params, config, options, tokens_BT, start_B, cache, length)
        return qwen2.logits(params, config, options, hidden_BTD[:, -1]), cache

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        names = ("batch", None)[: len(shape)]
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=options.layout.sharding(names, shape))

    cache = kv_cache.abstract_cache(config, options, batch, length)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
    jitted = jax.jit(step, donate_argnums=3, out_shardings=(None, shardings))
    params = qwen2.abstract_params(config, options)
    return jitted.lower(params, integers(batch, tokens), integers(batch), cache).compile()


def bytes_per_device(tree: object) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def longest_cache(config: Qwen2Config, options: ModelOptions, hbm: int) -> int:
    """The cache length, 8192 or halves of it, at which weights and SLOTS slots leave a tenth of the memory free."""
    weights, length = bytes_per_device(qwen2.abstract_params(config, options)), PROMPT
    while weights + bytes_per_device(kv_cache.abstract_cache(config, options, SLOTS, length)) > 0.9e9 * hbm:
        length //= 2
    return length


def report(name: str, compiled: jax.stages.Compiled, seconds: float, hbm: int) -> None:
    memory, gb = compiled.memory_analysis(), 1e-9
    arguments, temporary = memory.argument_size_in_bytes * gb, memory.temp_size_in_bytes * gb
    fresh = (memory.output_size_in_bytes - memory.alias_size_in_bytes) * gb
    total = arguments + temporary + fresh
    flops = compiled.cost_analysis()["flops"]
    verdict = "fits" if total < hbm else "TOO BIG"
    print(
        f"{name:<42} {arguments:8.2f} {temporary:8.2f} {fresh:8.2f} {total:8.2f} of {hbm:>3} {verdict:<8}"
        f" {flops:9.2e} {seconds:6.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    options = parser.parse_args()
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu would look for a TPU machine's metadata
    jax.config.update("jax_platforms", "cpu")
    print(f"{'GB per device':<42} {'in':>8} {'temp':>8} {'out':>8} {'total':>8}        {'':<8} {'FLOPs':>9} {'s':>6}")
    # The compiler counts the FLOPs of the layer loop's body once.
    for topology in options.topologies:
        model = rollout_options(topology)
        for size in options.sizes:
            for what, batch, tokens, length in (
                ("prefill", model.layout.mesh.shape["data"], PROMPT, PROMPT),
                ("decode", SLOTS, 1, longest_cache(SIZES[size], model, TOPOLOGIES[topology])),
            ):
                started = time.perf_counter()
                compiled = compile_step(SIZES[size], model, batch, tokens, length)
                name = f"{topology} {size} {what} {batch} x {tokens}, cache {length}"
                report(name, compiled, time.perf_counter() - started, TOPOLOGIES[topology])


if __name__ == "__main__":
    main()
