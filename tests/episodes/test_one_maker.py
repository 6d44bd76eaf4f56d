"""Whoever drives an agent, one function makes the trajectory from its turns."""

import dataclasses
import json
import sys

import pytest
from typer.testing import CliRunner

from memjax import trajectory as trajectory_module
from memjax.cli import app
from memjax.data.json_rows import read_rows
from memjax.rollout.fake import NeedleReader
from memjax.tokenizer import Tokenizer
from memjax.train.demonstrations import read_demonstrations
from memjax.train.loop import train
from memjax.trajectory import Trajectory
from tests.eval.stub_service import serving
from tests.train.tiny_run import tiny_run

TEXT = "The wind blew from the west. " * 60 + "The code is 4711. " + "The wind blew from the west. " * 60


@pytest.fixture
def makers(monkeypatch):
    """The names of the functions that construct trajectories."""
    found = set()
    real = Trajectory.__init__

    def init(self, *args, **kwargs):
        maker = sys._getframe(1).f_code
        found.add(maker.co_qualname if maker.co_filename != dataclasses.__file__ else "a copy")
        real(self, *args, **kwargs)

    monkeypatch.setattr(trajectory_module.Trajectory, "__init__", init)
    return found


def test_asking_evaluating_demonstrating_and_training_have_one_maker(makers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("URL", raising=False)
    (tmp_path / "text.txt").write_text(TEXT)
    task = '{"id": "1", "question": "Which code?", "context": "%s", "answers": ["4711"], "metric": "em"}\n'
    (tmp_path / "tasks.jsonl").write_text(task % TEXT)
    with serving(NeedleReader(r"code is (\d+)")) as service:
        model = ["--url", service.url, "--model", "stub"]
        asked = CliRunner().invoke(app, ["ask", "Which code?", str(tmp_path / "text.txt"), *model])
        assert asked.stdout == "4711\n", asked.stderr
        out = tmp_path / "results"
        evaluated = ["eval", "file", "--data", f"tasks={tmp_path / 'tasks.jsonl'}", "--out", str(out), *model]
        assert CliRunner().invoke(app, evaluated).exit_code == 0
    assert [row["metrics"] for _, row in read_rows(out / "samples_file.jsonl")]
    (tmp_path / "train").mkdir()
    model_directory = train(tiny_run(tmp_path / "train" / "run", steps=1))  # supervised stages, rollouts, validation
    written = {
        "type": "demonstration",
        "episode": "1",
        "messages": [{"role": "user", "content": "ask k01"}],
        "reply": "v01",
    }
    by_hand = [{"type": "journal", "version": 2}, written]
    (tmp_path / "hand.jsonl").write_text("".join(json.dumps(line) + "\n" for line in by_hand))
    assert len(read_demonstrations(tmp_path / "hand.jsonl", Tokenizer.load(model_directory))) == 1
    assert makers - {"a copy"} == {"trajectory_of"}
