"""What docs/rewards.md shows runs as it stands there, and its table has every metric."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from memjax.rewards import METRICS, Reads
from memjax.rewards.pool import Item, RewardPool
from memjax.rewards.transcript import Transcript, TranscriptTurn
from memjax.train.config import TrainConfig
from tests.episodes.drive import drive, scripted, task

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The blocks of the page that are files, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        if kind == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
            Path(name[1]).write_text(text)


def seen(reply, answer, *memories):
    turns = [TranscriptTurn((i,), "memory", "m", tokens, truncated=tokens > 999) for i, tokens in enumerate(memories)]
    return Transcript("?", ("Paris",), answer, reply, (*turns, TranscriptTurn((9,), "final", reply, 5000)))


def test_the_three_examples_do_what_they_say(files):
    cases = [
        ("length.py:short", seen("", "Paris"), 1.0),
        ("length.py:short", seen("", "Paris, I guess, or Rome. "), 0.2),
        ("form.py:boxed_once", seen(r"So \boxed{Rome}", "Rome"), 1.0),
        ("form.py:boxed_once", seen(r"So \boxed{Rome} or \boxed{Paris}", "Paris"), 0.0),
        ("memory.py:small_memory", seen("", "", 100, 300), 0.8),
        ("memory.py:small_memory", seen("", "", 100, 1024), 0.0),
    ]
    with RewardPool(workers=1) as pool:
        for name, transcript, value in cases:
            assert pool.check(name) is None
            score = pool.score(Item.of(name, transcript))
            assert (score.error, score.value) == (None, pytest.approx(value))


def test_the_example_of_several_rewards_is_a_config():
    (text,) = (text for kind, text in BLOCKS if kind == "yaml")
    values = {"out": "x", "model": "tiny", "steps": 1, "data": {"tiny": {}}, **yaml.safe_load(text)}
    config = TrainConfig.model_validate(values)
    assert [reward.name for reward in config.rewards] == ["task", "boxed_once", "small_memory"]


async def test_the_agent_of_the_page_gives_its_turn_a_reward():
    (text,) = (text for kind, text in BLOCKS if "async def agent" in text)
    found = {}
    exec(text, found)
    trajectory = await drive(found["agent"], task(), scripted())
    assert trajectory.error is None
    assert [span.reward for c in trajectory.conversations for span in c.spans] == [1.0]


def test_the_table_has_every_metric_and_what_it_reads():
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| (answer|reply|trajectory) \|", PAGE, re.MULTILINE))
    assert rows == {name: metric.reads for name, metric in METRICS.items()}
    assert all(f"Reads the {what}" in PAGE for what in get_args(Reads))
