"""A server under load: clients that come, wait, read and leave, and its throughput beside the engine's own.

    python benchmarks/serve_load.py MODEL --seconds 180 --clients 200

Prints one JSON object: what was answered, whether the slots are free and nothing was compiled at the end, memory before
and after, and the tokens per second (of the clock, and of the server's CPU time) of the server at 8 and 32 clients
beside those of as many callers of its engine without HTTP, measured in turn. The clients are a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from memjax.rollout.local import LocalClient
from memjax.serve.app import create_app
from memjax.serve.backend import load_client
from memjax.serve.listening import bind
from memjax.serve.server import Server
from memjax.serve.settings import ServeSettings
from memjax.trajectory import SamplingParams

_WAIT_SECONDS = 1800  # a client's patience, on a machine that does other work too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=180.0, help="of load with clients that leave")
    parser.add_argument("--clients", type=int, default=200, help="at the same time, under load")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=96, help="of each measurement of throughput")
    parser.add_argument("--rounds", type=int, default=3, help="of server and engine in turn")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        settings = ServeSettings(
            model=given.model, port=0, slots=given.slots, max_length=given.max_length, state_dir=Path(state)
        )
        client = load_client(settings)
        server = Server(create_app(client, settings), settings)
        listening = bind(settings.host, settings.port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        target = Target(
            f"http://127.0.0.1:{listening.getsockname()[1]}", client.engine.max_length, client.engine.vocabulary
        )
        try:
            asyncio.run(_ready(target.url))
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                before = _resident_mib()
                outcomes = pool.submit(_run, under_load, target, given.seconds, given.clients).result()
                report = {
                    "outcomes": outcomes,
                    "slots_used": _slots_used(client),
                    "mib_before_and_after": [before, _resident_mib()],
                    "throughput": [
                        throughput(pool, target, client, clients, given.requests, given.rounds) for clients in (8, 32)
                    ],
                    "compilations": client.engine.compilations,
                }
        finally:
            server.should_exit = True
            thread.join()
    print(json.dumps({"arguments": vars(given), **report}, indent=1))


def _slots_used(client: LocalClient) -> int:
    """How many slots are held a second after the last client went."""
    time.sleep(1)
    return client.scheduler.running


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(timeout=_WAIT_SECONDS) as http:
        while (await http.get(f"{url}/ready")).status_code != 200:
            await asyncio.sleep(0.5)


@dataclass(frozen=True)
class Target:
    """What the process of the clients must know."""

    url: str
    window: int
    vocabulary: int


async def under_load(target: Target, seconds: float, clients: int) -> dict[str, int]:
    """`clients` at a time with random lengths for so long; one request in ten is left by its client."""
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=_WAIT_SECONDS, limits=httpx.Limits(max_connections=clients)) as http:
        await asyncio.gather(*(_one_client(http, target, i, deadline, outcomes) for i in range(clients)))
    return dict(outcomes)


async def _one_client(
    http: httpx.AsyncClient, target: Target, seed: int, deadline: float, outcomes: Counter[str]
) -> None:
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        body = _body(rng, target) | {"stream": rng.random() < 0.5}
        request = asyncio.ensure_future(_answer(http, target.url, body))
        if rng.random() < 0.1:
            await asyncio.wait({request}, timeout=rng.random())
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            outcomes["left"] += 1
            continue
        try:
            status: int | str = await request
        except httpx.HTTPError as error:
            status = type(error).__name__
        outcomes[str(status)] += 1
        if status == 429:
            await asyncio.sleep(rng.random())


async def _answer(http: httpx.AsyncClient, url: str, body: dict) -> int:
    async with http.stream("POST", f"{url}/generate", json=body) as response:
        async for _ in response.aiter_bytes():
            pass
    return response.status_code


def throughput(
    pool: Executor, target: Target, client: LocalClient, clients: int, requests: int, rounds: int
) -> dict[str, Any]:
    """Tokens per second through the server and through the engine, in turn, and the median of their ratios.

    Beside the clock's seconds those of this process' CPUs, which other work on the machine hardly changes. Replies have
    one length and are so hot that hardly one ends early: how full the slots are does not depend on who comes first.
    """
    rng = random.Random(0)
    same = {"max_tokens": max(1, target.window // 8), "temperature": 50.0}
    bodies = [_body(rng, target) | same for _ in range(requests)]
    pairs = [
        (
            _rates(lambda: pool.submit(_run, _through_http, target, bodies, clients).result()),
            _rates(lambda: asyncio.run(_closed_loop(partial(_in_process, client), bodies, clients))),
        )
        for _ in range(rounds)
    ]
    return {
        "clients": clients,
        "per_second": _compared([(server.per_second, engine.per_second) for server, engine in pairs]),
        "per_cpu_second": _compared([(server.per_cpu_second, engine.per_cpu_second) for server, engine in pairs]),
    }


@dataclass(frozen=True)
class Rates:
    """Tokens by the clock and by the CPU time of this process."""

    per_second: float
    per_cpu_second: float


def _rates(measure: Callable[[], int]) -> Rates:
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = measure()
    return Rates(tokens / (time.perf_counter() - started), tokens / (time.process_time() - cpu_started))


def _compared(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [served / own for served, own in pairs]
    return {
        "server": [round(served, 1) for served, _ in pairs],
        "engine": [round(own, 1) for _, own in pairs],
        "ratio": round(float(np.median(ratios)), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _run(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    return asyncio.run(work(*arguments))


async def _through_http(target: Target, bodies: list[dict], clients: int) -> int:
    async with httpx.AsyncClient(timeout=_WAIT_SECONDS, limits=httpx.Limits(max_connections=clients)) as http:

        async def ask(body: dict) -> int:
            answer = await http.post(f"{target.url}/generate", json=body)
            return answer.raise_for_status().json()["usage"]["completion_tokens"]

        return await _closed_loop(ask, bodies, clients)


async def _in_process(client: LocalClient, body: dict) -> int:
    params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
    future = client.scheduler.submit(body["token_ids"], params)
    return (await asyncio.wrap_future(future))[0].completion_tokens


async def _closed_loop(ask: Callable[[dict], Awaitable[int]], bodies: list[dict], clients: int) -> int:
    """The tokens of all replies, with so many requests under way until none is left."""
    waiting = iter(bodies)

    async def work() -> int:
        return sum([await ask(body) for body in waiting])  # takes the next one when it is free

    return sum(await asyncio.gather(*(work() for _ in range(clients))))


def _body(rng: random.Random, target: Target) -> dict:
    longest = target.window // 4
    ids = [rng.randrange(target.vocabulary) for _ in range(rng.randint(1, longest))]
    return {"token_ids": ids, "max_tokens": rng.randint(1, longest), "temperature": 1.0, "seed": rng.randrange(1 << 31)}


def _resident_mib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return 0


if __name__ == "__main__":
    main()
