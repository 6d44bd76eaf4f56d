"""A whole run: what it logs, leaves behind and refuses."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from memjax.checkpoint import load_model
from memjax.episodes.recorded import Recording
from memjax.metrics import MetricsLog, read_metrics
from memjax.tokenizer import Tokenizer
from memjax.train.__main__ import app
from memjax.train.config import as_json
from memjax.train.loop import train
from memjax.train.report import curve, report
from memjax.train.rollouts import RolloutBatch, Sampler
from memjax.train.run import Run
from memjax.train.scored import ScoredTrajectory
from tests.train.tiny_run import FinishedRun, Witness, tiny_run


def test_stages_run_in_order_and_every_step_is_logged(finished: FinishedRun) -> None:
    assert finished.model == finished.config.out / "model"
    assert finished.witness.steps == [("demos", 1, 2), ("demos", 2, 2), ("rl", 1, 3), ("rl", 2, 3), ("rl", 3, 3)]
    assert [(row["stage"], row["step"]) for row in finished.rows] == [
        ("demos", 1),
        ("demos", 2),
        ("rl", 2),  # validation before the first step
        ("rl", 3),
        ("rl", 4),
        ("rl", 5),
    ]


def test_every_update_learns_something_and_rollouts_have_the_learner_s_weights(finished: FinishedRun) -> None:
    assert not finished.witness.said, "the alarm is silent"
    for row in finished.rows[-3:]:
        assert row["actor/grad_norm"] > 0
        assert 0 < row["training/rollout_logprobs_diff_max"] < 1e-4
        assert row["rollout/compilations"] == 0
        assert row["rollout/failed"] == row["rollout/reward_errors"] == 0
        assert row["rollout/conversations"] == 2 * 3 * 3
        assert row["training/skipped_steps"] == 0


def test_validation_is_before_the_first_step_and_after_every_one(finished: FinishedRun) -> None:
    validated = [row for row in finished.rows if "val/reward/mean@2" in row]
    assert [row["step"] for row in validated] == [2, 3, 4, 5]
    assert all(row["val/reward/mean@2"] <= row["val/reward/best@2"] for row in validated)


def test_rollouts_can_be_read(finished: FinishedRun) -> None:
    path = finished.config.out / "rollouts" / "step_2.jsonl"
    episodes = Recording(path, Tokenizer.load(finished.model)).episodes
    assert sorted(episodes) == [f"{task}/{sample}" for task in (2, 3) for sample in range(3)]
    for episode in episodes.values():
        assert (len(episode.digests), episode.begin["question"][:7]) == (3, "value k")
        assert episode.score is not None
        assert episode.end is not None
        assert episode.end["error"] is None
    rewards = [episode.score["reward"] for episode in episodes.values()]
    (row,) = (row for row in finished.rows if row["step"] == 4)
    assert np.mean(rewards) == pytest.approx(row["critic/rewards/mean"])


def test_the_exported_model_is_the_last_checkpoint_s(finished: FinishedRun) -> None:
    from memjax.checkpoint.store import TrainStore
    from memjax.train.learner import open_model
    from memjax.train.step import abstract_state

    model, _ = open_model(finished.config)
    with TrainStore(finished.config.out / "checkpoints") as store:
        assert store.latest == 5
        restored = store.restore(
            abstract_state(model.config, model.options, finished.config.optimizer), {"stage": 0, "step": 0, "tasks": 0}
        )
    assert restored is not None
    assert restored[1] == {"stage": 1, "step": 3, "tasks": 6}
    exported = load_model(finished.config.out / "model").params
    for ours, theirs in zip(jax.tree.leaves(restored[0].params), jax.tree.leaves(exported), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_model_is_exported_where_the_code_of_its_run_is_not(finished: FinishedRun, tmp_path: Path) -> None:
    out, target = tmp_path / "run", tmp_path / "model"
    shutil.copytree(finished.config.out, out)
    values = json.loads((out / "config.json").read_text())
    values["agent"] = {"name": "elsewhere.py:reader"}
    values["supervised"][0]["policies"] = {"elsewhere.py:script": 1.0}
    values["rewards"] = [{"metric": "elsewhere.py:reward", "outcome": True}]
    (out / "config.json").write_text(json.dumps(values))
    done = CliRunner().invoke(app, ["export", str(out), str(target)])
    assert done.exit_code == 0, done.output
    assert "holds the model after step 5" in " ".join(done.output.split())
    ours, theirs = load_model(target).params, load_model(finished.model).params
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))
    (out / "config.json").write_text(json.dumps(values | {"seed": "x"}))
    done = CliRunner().invoke(app, ["export", str(out), str(target)])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "config.json cannot be read: seed: Input should be a valid integer" in done.output


def test_a_run_that_goes_on_with_edited_code_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    texts = {
        "worker.py": "async def agent(task, episode): ...\n",
        "judges.py": "def first(prediction, answers): ...\n",
        "judging.py": "def second(prediction, answers): ...\n",
        "readers.py": "def script(task, rng): ...\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)

    def said() -> list[str]:
        rewards = [{"metric": "judges.py:first", "outcome": True}, {"metric": "judging:second"}]
        stage = {"name": "s", "kind": "demonstrations", "steps": 1, "policies": {"readers.py:script": 1.0}}
        config = tiny_run(tmp_path / "run", agent="worker.py:agent", rewards=rewards, supervised=[stage])
        with Run(config, witness := Witness(), threading.Event()):
            return witness.said

    assert said() == said() == []
    for edited, of in (
        (["worker.py"], ["worker.py:agent"]),
        (["judging.py"], ["judging:second"]),
        (["judges.py", "readers.py"], ["judges.py:first", "readers.py:script"]),
    ):
        for name in edited:
            Path(name).write_text(texts[name] + "# edited\n")
        assert [line.partition(" have changed")[0] for line in said()] == [
            f"the code or prompts of {name}" for name in of
        ]
        assert said() == []


def test_a_report_has_a_table_for_each_stage(finished: FinishedRun, tmp_path: Path) -> None:
    assert [str(table.title).partition(":")[0] for table in report(finished.config.out)] == ["demos", "rl"]
    with pytest.raises(ValueError, match="holds no run"):
        report(tmp_path)


def test_a_curve_rises_from_its_lowest_to_its_highest_bar() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert curve([2, 2]) == "▁▁"
    assert len(curve(range(1000), width=40)) == 40


def test_more_groups_than_tasks_are_refused(finished: FinishedRun) -> None:
    config = tiny_run(finished.config.out.parent / "refused", supervised=[], rollout={"groups": 7, "max_length": 64})
    with pytest.raises(ValueError, match=r"rollout.groups = 7 tasks, but there are only 6"):
        train(config)


def test_a_window_that_a_conversation_cannot_fit_is_refused(finished: FinishedRun) -> None:
    agent = {**finished.config.agent.model_dump(), "memory": 40}
    config = tiny_run(finished.config.out.parent / "window", supervised=[], agent=agent)
    with pytest.raises(ValueError, match=r"the window of rollout.max_length holds 64: lower"):
        train(config)


def test_a_reference_is_the_model_that_the_run_began_with(finished: FinishedRun) -> None:
    out = finished.config.out.parent / "reference"
    config = tiny_run(out, supervised=[], validation={}, steps=2, objective={"kl_coef": 0.1})
    train(config)
    first, second = (row["actor/kl_loss"] for row in read_metrics(out / "metrics.jsonl") if "actor/loss" in row)
    assert 0 < first < second, "the policy moves away from it"


def test_a_run_that_found_nothing_to_learn_says_so(finished: FinishedRun) -> None:
    # Nobody who has not learned to read answers right, so every reward is 0 and every group is left out.
    tasks = finished.config.out.parent / "tasks.jsonl"
    config = tiny_run(
        finished.config.out.parent / "idle", supervised=[], validation={}, steps=2, preset="dapo", data={"path": tasks}
    )
    witness = Witness()
    train(config, witness)
    (said,) = witness.said
    assert said.startswith("2 of 2 steps changed nothing: all answers of each of their groups had the same reward.")


def test_what_could_not_be_scored_might_as_well_not_be_there(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, only = finished.config.out.parent, {"supervised": [], "validation": {}, "steps": 1}
    data = {"path": runs / "tasks.jsonl", "metric": "tests.train.odd_rewards:scatter_or_crash"}
    crashed = train(tiny_run(runs / "crashes", data=data, **only))
    *_, row = read_metrics(runs / "crashes" / "metrics.jsonl")
    assert 0 < row["rollout/reward_errors"] == row["rollout/lost"] <= 3
    assert row["actor/grad_norm"] > 0
    batch = Sampler.batch

    def without(sampler: Sampler, sampled: Sequence[ScoredTrajectory], *metrics: Any) -> RolloutBatch:
        return batch(sampler, [one for one in sampled if one.reward >= 3 / 8], *metrics)

    monkeypatch.setattr(Sampler, "batch", without)
    smaller = train(tiny_run(runs / "smaller", **only))
    assert weights(crashed) == weights(smaller)


def test_a_reward_that_never_works_ends_the_run_with_its_reason(finished: FinishedRun) -> None:
    data = {"path": finished.config.out.parent / "tasks.jsonl", "metric": "tests.train.odd_rewards:crashes"}
    config = tiny_run(finished.config.out.parent / "unscored", supervised=[], validation={}, data=data)
    file = config.out.with_suffix(".yaml")
    file.write_text(json.dumps(as_json(config)))
    ended = CliRunner().invoke(app, ["--config", str(file)])
    assert ended.exit_code == 1
    assert re.search(r"6 of 6 trajectories could not be finished or scored: .* judge service unreachable", ended.stderr)


def test_another_config_in_the_same_directory_is_refused(finished: FinishedRun) -> None:
    with pytest.raises(ValueError, match=r"holds a run with seed = 0, not 1"):
        train(finished.config.model_copy(update={"seed": 1}), stop=threading.Event())


def test_a_log_drops_what_will_be_made_again_and_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(4):
            log.write(step, {"x": float("nan") if step == 1 else step / 2, "stage": "rl"})
    path.write_text(path.read_text() + '{"step": 4, "x"')
    MetricsLog(path, step=2).close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    assert [row["x"] for row in read_metrics(path)] == [0, None, 1]


def weights(model: Path | None) -> bytes:
    assert model is not None
    return (model / "model.safetensors").read_bytes()


def stage(**changes: Any) -> dict[str, Any]:
    return {"name": "demos", "kind": "demonstrations", "examples": 4, "tasks": {"max_chunks": 2}, **changes}


def test_a_stage_ends_where_its_loss_is_low_enough(finished: FinishedRun) -> None:
    out = finished.config.out.parent / "early"
    stages = [stage(steps=9, min_steps=2, until_loss=1e6), stage(name="more", steps=1)]
    config = tiny_run(out, supervised=stages, steps=0, validation={})
    witness = Witness()
    train(config, witness)
    assert witness.steps == [("demos", 1, 9), ("demos", 9, 9), ("more", 1, 1)]
    shutil.rmtree(out / "checkpoints" / "10")  # as if it had been killed between the stages
    witness = Witness()
    train(config, witness)
    assert witness.steps == [("more", 1, 1)]


def test_a_stage_that_does_not_learn_ends_the_run_however_often_it_is_started(finished: FinishedRun) -> None:
    config = tiny_run(finished.config.out.parent / "stuck", supervised=[stage(steps=2, until_loss=0.0)], steps=0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"stage demos has not reached a loss of 0.0 in 2 updates \(\d"):
            train(config)
    assert [row["step"] for row in read_metrics(config.out / "metrics.jsonl")] == [1]
