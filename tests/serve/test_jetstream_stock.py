"""How stock JetStream 0.2.2 dies of a request, each in a process of its own: why its driver does not serve here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_SERVER = """
import asyncio, logging, sys, time
import jax, jax.numpy
from memjax.rollout import jetstream
with jetstream._seqio_stand_in():
    from jetstream.core import orchestrator, config_lib
    from jetstream.core.utils.async_multifuture import AsyncMultifuture
    from jetstream.engine import mock_engine
logging.getLogger().setLevel(logging.ERROR)
if MENDED:
    jetstream.load_orchestrator()

class SmallWork:  # for the mock, which multiplies ones of 4096 x 4096 at each step to pass the time
    ones = staticmethod(lambda shape: jax.numpy.ones((4, 4)))
    def __getattr__(self, name):
        return getattr(jax.numpy, name)

mock_engine.jnp = SmallWork()
engine = mock_engine.TestEngine(batch_size=4, cache_length=256, weight=2.0)
params = engine.load_params()
driver = orchestrator.Driver([engine], [engine], [params], [params], interleaved_mode=True, jax_padding=False)

async def ask(content, max_tokens, session=""):
    request = orchestrator.ActiveRequest(
        max_tokens=max_tokens, return_channel=AsyncMultifuture(), history_path=session, prefill_content=content,
        is_client_side_tokenization=not isinstance(content, str),
    )
    driver.place_request_on_prefill_queue(request)
    return request.return_channel

async def whole(*arguments):
    async for _ in await ask(*arguments):
        pass

async def leave(*arguments):
    await anext(await ask(*arguments))

asyncio.run(CALL)
time.sleep(20)
print("alive", flush=True)
import os
os._exit(0)
"""

DEATHS = {
    "any first request": (False, "whole([65, 66], 4)"),
    "a session with token ids": (True, 'whole([65, 66], 4, "x")'),
    "text with a character past what the mock decodes": (True, 'whole("AB", 100)'),
    "a client in the process that left early": (True, "leave([65, 66], 100)"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_stock_jetstream_dies_of(death):
    mended, call = DEATHS[death]
    script = _SERVER.replace("MENDED", str(mended)).replace("CALL", call)
    one_device = os.environ | {"XLA_FLAGS": ""}  # the mock engine takes no more
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=one_device)
    assert done.returncode == -signal.SIGKILL, f"{done.returncode} {done.stdout[-500:]} {done.stderr[-2000:]}"
