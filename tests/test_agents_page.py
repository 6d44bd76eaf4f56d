"""docs/agents.md: its agents work, and its config and table tell what is there."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from memjax.agents.__main__ import app
from memjax.agents.registry import own_class
from memjax.episodes.episode import Episode
from memjax.episodes.limits import Limits
from memjax.rollout.fake import ScriptedClient
from memjax.train.config import SupervisedStage, read_config
from tests.episodes.drive import drive, task

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page's files in the current directory."""
    for name, text in BLOCKS:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_python_block_is_a_file_that_is_tried_here():
    assert PAGE.count("```python") == len(BLOCKS) == 2


async def test_the_first_agent_reads_until_something_is_found(written):
    agent = own_class(f"{written}/first_mention.py:first_mention")()
    client = ScriptedClient(lambda prompt, params: "at noon" if "bell" in prompt else "none")
    done = await drive(agent, task("x" * 4100 + "the bell" + "y" * 9000), client)
    assert (done.answer, done.counters["model_calls"]) == ("at noon", 2)
    assert (await drive(agent, task("x" * 5000), client)).answer == "The text does not say."
    assert len(BLOCKS[0][1].strip().splitlines()) - 3 <= 12  # without the import


async def test_the_second_has_keys_and_fits_what_it_says(written):
    agent = own_class(f"{written}/keyed.py:Skimmer")(chunk=100, words=10)
    client = ScriptedClient(lambda prompt, params: "an answer")
    text = "z" * 1000
    done = await drive(agent, task(text), client)
    assert done.answer == "an answer"
    longest = sum(agent.longest_turn(task().question, done_tokenizer := ByteCounts(), len(text)).values())
    assert done.counters["prompt_tokens"] + 256 <= longest < len(text), done_tokenizer


class ByteCounts:
    def count(self, text):
        return len(text)


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if "agents check" in line and line[0] == " "])
def test_the_checks_of_the_page_end_fine(written, line):
    words = [word for word in shlex.split(line)[2:] if word != "--tokenizer" and word != "MODEL"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "fine"), done.output


def test_the_configs_of_the_page_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    (stage,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])["supervised"]
    assert SupervisedStage.model_validate(stage).policies
    assert read_config(Path("configs/train/tiny_bullets.yaml")).agent.bullets == 10
    other = read_config(
        Path("configs/train/memagent_qwen2_5_7b.yaml"),
        ["agent.name=examples/bullets.py:Bullets", "agent.bullets=1024", "data.path=x", "validation.data.path=x"],
    )
    assert other.agent.bullets == 1024


def test_the_tables_have_what_is_there():
    for name in re.findall(r"^\| `(?:await )?(\w+)\(", PAGE, re.MULTILINE):
        assert callable(getattr(Episode, name))
    named = {name for name in vars(Episode) if not name.startswith("_") and inspect.isfunction(vars(Episode)[name])}
    assert named - {"enter", "exit", "leave"} <= set(re.findall(r"`(?:await )?(\w+)\(", PAGE))
    assert set(Limits.model_fields) <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
