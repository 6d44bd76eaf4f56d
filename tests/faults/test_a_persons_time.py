"""A person's mistake is told before jax, which takes seconds, is imported; and what waits is told truly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Any import of jax then fails, with a word that no message has.
WITHOUT_JAX = "import sys; sys.modules['jax'] = None; from memjax.cli import main; main()"
TINY, CONFIG = "memjax/assets/tiny", "configs/train/tiny.yaml"
ROOT = Path(__file__).parents[2]

MISTAKES = [
    (["train", "run", "--config", CONFIG, "rollout.smaples=3"], "did you mean rollout.samples"),
    (["train", "run", "--config", CONFIG, "steps=abc"], "steps"),
    (["train", "run", "--config", "absent.yaml"], "there is no config file absent.yaml"),
    (["train", "run", "--config", CONFIG, "--out", "x"], "out=x"),
    (["train", "run", "--config", CONFIG, "--rollout.samples=4"], "rollout.samples=4"),
    (["train", "export", "absent", "y"], "absent holds no run"),
    (["train", "report", "absent"], "absent holds no run"),
    (["train", "demonstrations", "--config", "absent.yaml", "--out", "x"], "there is no config file"),
    (["train", "keys", "nothing"], "no key begins with 'nothing'"),
    (["ask", "q", "absent.txt", "-m", TINY], "absent.txt: check the path"),
    (["ask", "q", "README.md", "-m", "/absent"], "no model at '/absent'"),
    (["ask", "q", "README.md", "-m", TINY, "--layout", "x"], "memory_first"),
    (["eval", "smoke", "--model", "/absent", "--out", "e"], "no model at '/absent'"),
    (["eval", "smoky", "--model", TINY, "--out", "e"], "did you mean smoke"),
    (["eval", "file", "--data", f"tasks={ROOT}/README.md", "--model", TINY, "--out", "e"], "not valid JSON"),
    (["eval", "file", "--data", "tasks=absent.jsonl", "--model", TINY, "--out", "e"], "absent.jsonl"),
    (["serve", "--model", TINY, "--port", "99999"], "port"),
    (["serve", "--model", "/absent"], "no model at '/absent'"),
    (["serve", "--model", TINY, "--api-key", ""], "holds an empty key"),
    (["convert", "/absent", "x"], "no model at '/absent'"),
    (["plan", "--config", "absent.yaml", "--topology", "v5e:8x8"], "there is no config file absent.yaml"),
    (["plan", "--config", CONFIG, "--topology", "v5e-63"], "there is no slice v5e-63"),
    (["plan", "--config", CONFIG, "--topology", "v7:2x2"], "no topology is called"),
    (["agents", "check", "absent.py:x"], "there is no file absent.py"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_told_without_jax(words, message, tmp_path):
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    words = [str(ROOT / word) if word and (ROOT / word).exists() else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert message in " ".join(done.stderr.split()), done.stderr
    assert "jax" not in done.stderr.replace("memjax", "")
    assert done.returncode == 2
    assert not list(tmp_path.glob("[exy]*"))
