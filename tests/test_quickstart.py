"""The bundled tiny model: its files are those of its task, and it reads what the quickstart shows, offline."""

import asyncio
import json

import jax.numpy as jnp
from typer.testing import CliRunner

from memjax import quickstart
from memjax.agents.memagent import MemAgent
from memjax.cli import app
from memjax.data.tiny import ASSETS, BUDGETS, WINDOW, TinyTasks, model_config, write_tokenizer
from memjax.episodes.run import run_episode
from memjax.rewards.answers import extract_answer
from memjax.rollout.local import LocalClient
from memjax.trajectory import SamplingParams


def test_the_bundle_has_the_words_and_the_shape_of_the_task(tmp_path):
    write_tokenizer(tmp_path)
    assert (ASSETS / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()
    bundled = json.loads((ASSETS / "config.json").read_text())
    assert {name: bundled[name] for name in model_config() if name in bundled and name != "eos_token_id"} == {
        name: value for name, value in model_config().items() if name in bundled and name != "eos_token_id"
    }
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < 500_000


async def test_the_bundled_model_answers_what_it_was_trained_for():
    tasks = [TinyTasks(min_chunks=16, max_chunks=16, seed=2000).task(i) for i in range(32)]
    async with LocalClient.load(ASSETS, max_length=WINDOW, slots=32, dtype=jnp.float32) as client:
        agent = MemAgent(**BUDGETS, prompts=ASSETS / "prompts")
        greedy = SamplingParams(temperature=0.0, seed=0)
        read = await asyncio.gather(*(run_episode(agent, task, client, client.tokenizer, greedy) for task in tasks))
    right = [extract_answer(t.answer) in task.answers for t, task in zip(read, tasks, strict=True)]
    assert sum(right) >= 30


def test_the_quickstart_needs_nothing_and_shows_what_happens(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("URL", raising=False)
    monkeypatch.setattr(quickstart, "CHUNKS", 64)
    result = CliRunner().invoke(app, ["quickstart"])
    assert result.exit_code == 0, result.stderr
    said = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert said["Document:"].startswith("1,536 tokens, 24 windows; ")
    assert said["Answer:"] == said["Expected:"]
    assert said["Result:"] == "right"
    assert "of 64: the memory is now" in result.stderr


def test_the_document_of_the_quickstart_is_two_thousand_windows_long():
    assert quickstart.CHUNKS * BUDGETS["chunk"] >= 2000 * WINDOW
