"""20 SIGKILLs at random moments of a command, a server's run and an evaluation: the same calls, the same answer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from memjax.episodes.journal import read_lines
from memjax.serve.listening import bind
from tests.eval.stub_service import serving
from tests.serve.conftest import wait_for
from tests.tiny_model import write_tiny_model

KILLS = 20
CHUNKS = 2001
TEXT = "".join(f"w{i:05} " for i in range(CHUNKS * 16 // 6))  # 6 estimated tokens a word
BUDGETS = {"chunk": 16, "memory": 40, "answer": 40, "question": 16}

pytestmark = pytest.mark.slow


def chained(prompt, params):
    """A reply that depends on every word of the prompt: any slip shows in the end."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def calls(path: Path) -> dict[tuple[str, tuple], dict]:
    """The call lines of a journal by episode and key; none may be there twice."""
    found: dict[tuple[str, tuple], dict] = {}
    for _, _, line in read_lines(path):
        if line["type"] == "call":
            key = line["episode"], tuple(line["key"])
            assert key not in found, f"{key} was called twice"
            found[key] = line
    return found


def said(path: Path) -> dict:
    return {key: line["reply"]["text"] for key, line in calls(path).items()}


def killed_until_done(command: list[str], environ: dict[str, str], longest: float) -> None:
    """Start a command, kill it, and so on; the last one may finish."""
    dice = random.Random(5)
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
        time.sleep(dice.uniform(0.2, longest))
        process.kill()
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def environ(tmp_path):
    compiled = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", tmp_path / "xla"))
    kept = {name: value for name, value in os.environ.items() if name not in ("URL", "API_KEY")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state"), "JAX_COMPILATION_CACHE_DIR": str(compiled)}


def test_an_ask_of_2001_chunks(tmp_path, environ):
    document, journal, straight = tmp_path / "text.txt", tmp_path / "killed.jsonl", tmp_path / "straight.jsonl"
    document.write_text(TEXT)
    with serving(chained) as service:
        command = [sys.executable, "-m", "memjax.cli", "ask", "What?", str(document), "--url", service.url]
        command += [word for name, n in BUDGETS.items() for word in (f"--{name}-tokens", str(n))]
        subprocess.run([*command, "--journal", str(straight)], check=True, capture_output=True, env=environ)
        asked = len(service.prompts)
        killed_until_done([*command, "--journal", str(journal)], environ, longest=4.0)
        repeated = len(service.prompts) - 2 * asked
    assert asked >= CHUNKS + 1
    assert said(journal) == said(straight)
    assert repeated <= KILLS  # the call under way, and no other
    drives = sum(line["type"] == "begin" for _, _, line in read_lines(journal))
    assert drives > 5, "the kills came too early to say anything"


def test_an_eval_sample_of_2001_chunks(tmp_path, environ):
    tasks = tmp_path / "tasks.jsonl"
    task = {"id": "1", "question": "What?", "context": TEXT, "answers": ["x"], "metric": "em"}
    tasks.write_text(json.dumps(task) + "\n")
    with serving(chained) as service:

        def command(out: str) -> list[str]:
            base = [
                sys.executable,
                "-m",
                "memjax.cli",
                "eval",
                "file",
                "--data",
                f"tasks={tasks}",
                "--url",
                service.url,
            ]
            budgets = [word for name, n in BUDGETS.items() for word in (f"--{name}-tokens", str(n))]
            return [*base, *budgets, "--model", "stub", "--out", str(tmp_path / out)]

        subprocess.run(command("straight"), check=True, capture_output=True, env=environ)
        asked = len(service.prompts)
        killed_until_done(command("killed"), environ, longest=5.0)
        repeated = len(service.prompts) - 2 * asked
    assert asked >= CHUNKS + 1
    rows = [json.loads((tmp_path / out / "samples_file.jsonl").read_text()) for out in ("straight", "killed")]
    for row in rows:
        del row["started"], row["seconds"], row["commit"]
    assert rows[0] == rows[1]
    assert repeated <= KILLS


class Server:
    """`memjax serve` on the tiny model, which is killed and started again."""

    def __init__(self, model: Path, state: Path, environ: dict[str, str]):
        with bind("127.0.0.1", 0) as free:
            port = str(free.getsockname()[1])
        self.url, self.environ = f"http://127.0.0.1:{port}", environ
        self.command = [sys.executable, "-m", "memjax.cli", "serve", "--model", str(model), "--port", port]
        self.command += ["--state-dir", str(state), "--slots", "2", "--max-length", "640"]
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=quiet, stderr=quiet, env=self.environ)
        wait_for(lambda: self.process.poll() is not None or self.is_ready(), 180)
        assert self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def begin(self, ask: dict) -> str:
        with httpx.stream("POST", f"{self.url}/v1/memory/answers", json=ask, timeout=60) as response:
            assert response.status_code == 200, response.read()
            return response.headers["x-memjax-run"]

    def wait_for(self, run: str) -> None:
        def status() -> str:
            return httpx.get(f"{self.url}/v1/memory/answers/{run}", timeout=60).json()["status"]

        wait_for(lambda: status() != "reading", 600)
        assert status() == "done"


def test_a_run_of_a_server(tmp_path, environ):
    dice, state = random.Random(7), tmp_path / "serve"
    server = Server(write_tiny_model(tmp_path / "model"), state, environ)
    budgets = {"chunk_tokens": 60, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
    ask = {
        "text": "The lamp room door opens with a code. " * 1200,
        "question": "Which code?",
        "stream": True,
        **budgets,
    }
    try:
        straight = server.begin(ask)
        server.wait_for(straight)
        killed = server.begin(ask)
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.05, 0.8))
            server.kill()
            server.start()
        server.wait_for(killed)
    finally:
        server.kill()
    journals = [next(state.rglob(f"{run}/journal.jsonl")) for run in (straight, killed)]
    assert said(journals[0]) == said(journals[1])
    assert len(said(journals[0])) > 200
    drives = sum(line["type"] == "begin" for _, _, line in read_lines(journals[1]))
    assert drives > 5, "the run was over before the kills came"
