"""JetStream's own driver over the engine, and the engine without JetStream: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_ENGINE = """
import pathlib, sys
import numpy as np
from memjax.checkpoint import load_model
from memjax.rollout import jetstream
from memjax.rollout.engine import EngineConfig
from memjax.rollout.local import make_engine
from memjax.trajectory import SamplingParams

engine = make_engine(load_model(sys.argv[1]), EngineConfig(slots=2, max_length=48, prefill_buckets=(16,)))
prompts = [np.arange(5 + 3 * i, dtype=np.int32) for i in range(5)]

def greedy(prompt, max_tokens):
    prefix = engine.prefill(params=engine.weights, padded_tokens=prompt, true_length=len(prompt))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    state, tokens = engine.insert(prefix, engine.init_decode_state(), 1, sampling=sampling), []
    while True:
        state, drawn = engine.generate(engine.weights, state)
        drawn = drawn.convert_to_numpy()
        if not drawn.valid[1]:
            return tokens
        tokens.append(int(drawn.tokens[1]))
"""

_DRIVER = """
import asyncio, logging
assert isinstance(engine, jetstream.Engine) and jetstream.INSTALLED
level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
orchestrator = jetstream.load_orchestrator()
from jetstream.core.utils.async_multifuture import AsyncMultifuture
from jetstream.engine import engine_api
assert issubclass(type(engine), engine_api.Engine)
assert (logging.getLogger().level, logging.getLogger().handlers) == (level, handlers)
assert "seqio" not in sys.modules

async def ask(driver, prompt, max_tokens):
    request = orchestrator.ActiveRequest(
        max_tokens=max_tokens,
        return_channel=AsyncMultifuture(),
        history_path="no token in front",
        prefill_content=prompt,
        is_client_side_tokenization=True,
    )
    driver.place_request_on_prefill_queue(request)
    return [token async for samples in request.return_channel for token in samples[0].token_ids]

async def main():
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=True,
    )
    replies = await asyncio.gather(*(ask(driver, prompt, 6 + i) for i, prompt in enumerate(prompts)))
    driver.stop()
    return replies

for i, (prompt, reply) in enumerate(zip(prompts, asyncio.run(main()))):
    expected = [token for token in greedy(prompt, 6 + i) if token not in engine.eos_ids]
    assert reply == expected and reply, (reply, expected)
print("served")
"""

_ABSENT = """
assert not jetstream.INSTALLED and sys.modules["jetstream"] is None
assert len(greedy(prompts[2], 7)) <= 7
print("served")
"""


def python(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def test_the_engine_serves_under_the_stock_driver(model_directory):
    assert "served" in python(_ENGINE + _DRIVER, str(model_directory))


def test_the_engine_runs_without_jetstream(model_directory):
    assert "served" in python("import sys; sys.modules['jetstream'] = None" + _ENGINE + _ABSENT, str(model_directory))


def test_importing_memjax_imports_no_jetstream():
    python("import memjax, memjax.rollout.client, sys; assert not {'jetstream', 'jax', 'seqio'} & set(sys.modules)")
