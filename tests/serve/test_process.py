"""The command as a process: signals, a kill in the middle of a document, and one port for one server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import wait_for
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

IDS = {"token_ids": [1, 2, 3], "max_tokens": 8, "temperature": 0}
TEXT = "The lamp room door opens with a code. " * 100
ASK = {
    "text": TEXT,
    "question": "Which code?",
    "chunk_tokens": 100,
    "memory_tokens": 32,
    "answer_tokens": 16,
    "question_tokens": 16,
}


@dataclass(frozen=True)
class Process:
    """`memjax serve`, ready."""

    process: subprocess.Popen
    url: str

    def post(self, path: str, json: dict, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=60, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)


SMALL = ["--max-length", "640", "--slots", "2"]


def command(model: Path, state_dir: Path, port: int, options: list[str]) -> list[str]:
    places = ["--model", str(model), "--state-dir", str(state_dir), "--port", str(port)]
    return [sys.executable, "-m", "memjax.cli", "serve", *places, *options]


@contextmanager
def served(model: Path, state_dir: Path, *, options: list[str] = SMALL) -> Iterator[Process]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MEMJAX_ADMIN_KEY": "admin", "PYTHONUNBUFFERED": "1"}
    environment["XLA_FLAGS"] = ""
    line = command(model, state_dir, 0, options)
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout
    url = ""
    try:
        for said in process.stdout:
            if found := re.search(r"http://\S+", said):
                url = found[0]
                break
        assert url, "it did not start"
        wait_for(lambda: httpx.get(url + "/ready", timeout=60).status_code == 200, 600)
        yield Process(process, url)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("process") / "tiny")


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("state")


def test_a_server_swaps_weights_drains_and_leaves_its_port_to_the_next(model, state_dir, tmp_path):
    with served(model, state_dir) as server:
        before = server.post("/generate", IDS).json()["samples"][0]
        assert set(before["weights_versions"]) == {0}
        port = httpx.URL(server.url).port
        second = subprocess.run(command(model, tmp_path, port or 0, SMALL), capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert "cannot be listened on" in second.stderr

        other = write_tiny_model(tmp_path / "other", seed=1)
        key = {"Authorization": "Bearer admin"}
        swap = server.post("/admin/weights", {"directory": str(other), "version": 7}, headers=key)
        assert swap.json() == {"weights_version": 7}
        after = server.post("/generate", IDS).json()["samples"][0]
        assert set(after["weights_versions"]) == {7}
        assert after["token_ids"] != before["token_ids"]
        assert server.post("/admin/weights", {"directory": "/nowhere"}, headers=key).status_code == 400

        write_tiny_model(other, seed=0)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "memjax_weights_version 8.0" in server.get("/metrics").text)
        assert server.post("/generate", IDS).json()["samples"][0]["token_ids"] == before["token_ids"]
        assert "memjax_compilations 0.0" in server.get("/metrics").text

        body = IDS | {"max_tokens": 500, "temperature": 50.0, "seed": 1, "stream": True}
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) in (0, -signal.SIGTERM)


def drawn(server: Process, run_id: str) -> dict[str, list[str | None]]:
    """What says the ids of every reply, by the key of its call; each call was made once."""
    lines = map(json.loads, server.get(f"/v1/memory/answers/{run_id}/journal").text.splitlines())
    calls = [line for line in lines if line["type"] == "call"]
    assert len({line["digest"] for line in calls}) == len(calls)
    return {str(line["key"]): [line["reply"].get(name) for name in ("text", "tokens", "ids")] for line in calls}


def test_a_killed_server_finishes_the_document_with_the_memory_of_an_undisturbed_run(model, state_dir):
    with served(model, state_dir) as server:
        whole = server.post("/v1/memory/answers", ASK).json()
        assert whole["chunks_read"] > 10
        path = server.url + "/v1/memory/answers"
        with httpx.stream("POST", path, json=ASK | {"stream": True}, timeout=60) as response:
            run_id = response.headers["x-memjax-run"]
            for line in response.iter_lines():
                if '"index": 3' in line:
                    server.process.send_signal(signal.SIGKILL)
                    break
        server.process.wait(60)
    with served(model, state_dir) as server:
        wait_for(lambda: server.get(f"/v1/memory/answers/{run_id}").json()["status"] == "done", 100)
        run = server.get(f"/v1/memory/answers/{run_id}").json()
        assert drawn(server, run_id) == drawn(server, whole["id"])
    assert run["answers"] == whole["answers"]
