"""What honest clients get beside hostile ones: statuses, and the median latency as a ratio to honest clients alone.

    uv run python benchmarks/serve_hostile.py --seconds 60

The server runs the tiny model on core 0, all clients on core 1. The hostile ones send bodies made to take long, ask for
thousands of replies, upload pages that stall a parser, and leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Annotated

import httpx
import typer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "value k1"}], "max_tokens": 8}
JSON = {"Content-Type": "application/json"}
PAGE = b"<html>hello " + b"<!--" * 100_000
HOSTILE = [
    ("/v1/chat/completions", b'{"model":"tiny","messages":[' + b"{}," * 300_000 + b"{}]}"),
    ("/generate", b'{"max_tokens":1,"token_ids":[' + b'"",' * 300_000 + b"1]}"),
    ("/v1/completions", b'{"model":"tiny","prompt":[' + b"1.5," * 200_000 + b"1.5]}"),
    ("/tokenize", json.dumps({"text": "The quick brown fox. " * 40_000}).encode()),
    ("/generate", b'{"token_ids":[5],"max_tokens":2,"top_k":2147483648}'),
    ("/v1/completions", json.dumps({"model": "tiny", "prompt": ["a"] * 64, "n": 2, "max_tokens": 60}).encode()),
    ("/v1/completions", json.dumps({"model": "tiny", "prompt": ["a"] * 64, "n": 64}).encode()),
    ("/v1/memory/answers", json.dumps({"text": "words " * 20_000, "question": "q", "stream": True}).encode()),
]


def main(
    seconds: Annotated[float, typer.Option(help="Of each of the two parts.")] = 180.0,
    port: Annotated[int, typer.Option(help="Of the server.")] = 8399,
) -> None:
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as state:
        server = subprocess.Popen(
            [
                *("taskset", "-c", "0", sys.executable, "-c", "from memjax.cli import main; main()", "serve"),
                *("-m", "memjax/assets/tiny", "--served-name", "tiny", "--port", str(port), "--state-dir", state),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            asyncio.run(measure(f"http://127.0.0.1:{port}", seconds))
        finally:
            server.terminate()
            server.wait()


async def measure(url: str, seconds: float) -> None:
    await ready(url)
    alone, statuses = await honest(url, seconds, hostile=False)
    beside, beside_statuses = await honest(url, seconds, hostile=True)
    for name, times, codes in (("alone", alone, statuses), ("beside hostile", beside, beside_statuses)):
        middle, worst = statistics.median(times), max(times)
        print(f"{name}: {dict(codes)}, median {middle * 1e3:.0f} ms, longest {worst * 1e3:.0f} ms")
    print(f"median, beside hostile / alone: {statistics.median(beside) / statistics.median(alone):.2f}")


async def ready(url: str) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"{url}/ready")).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def honest(url: str, seconds: float, *, hostile: bool) -> tuple[list[float], Counter[int]]:
    """How long chats of three honest clients took, and their statuses."""
    until, times, statuses = time.monotonic() + seconds, list[float](), Counter[int]()

    async def one() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while time.monotonic() < until:
                begun = time.monotonic()
                response = await client.post(f"{url}/v1/chat/completions", json=CHAT)
                times.append(time.monotonic() - begun)
                statuses[response.status_code] += 1
                await asyncio.sleep(0.05)

    hurting = [asyncio.create_task(hurt(url, number)) for number in range(4)] if hostile else []
    await asyncio.gather(*(one() for _ in range(3)))
    for task in hurting:
        task.cancel()
    await asyncio.gather(*hurting, return_exceptions=True)
    return times, statuses


async def hurt(url: str, number: int) -> None:
    """Send one hostile thing after another, and leave early every third time."""
    while True:
        async with httpx.AsyncClient(timeout=1.0 if number % 3 == 0 else 20.0) as client:
            path, body = HOSTILE[number % len(HOSTILE)]
            try:
                if number % 5 == 4:
                    await client.post(f"{url}/v1/files", files={"file": ("a.html", PAGE)})
                else:
                    await client.post(url + path, content=body, headers=JSON)
            except httpx.HTTPError:
                pass
        number += 1
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    typer.run(main)
