"""Rewards of the user's own see what they ask for, are summed, and are refused or told when they do not work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memjax.data.tasks import write_tasks
from memjax.episodes.diagnosis import Diagnosis
from memjax.rewards.pool import RewardPool
from memjax.rewards.transcript import Transcript, TranscriptTurn
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.train.config import RewardConfig, TrainConfig
from memjax.train.loop import train
from memjax.train.rollouts import Sampler, TaskSource, batch_metrics
from memjax.train.scored import ScoredTrajectory, from_bytes, to_bytes
from memjax.train.scoring import Scorer, Watched, check_rewards, reward_means
from memjax.trajectory import Conversation, Span, Task, Trajectory

OWN = str(Path(__file__).parent / "reward_files.py")
SAMPLES = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2, timeout=5) as pool:
        yield pool


def scored(pool: RewardPool, rewards: list[RewardConfig], reply: str, metric: str = "em") -> ScoredTrajectory:
    task = Task("t", "Who?", "A text.", ("Paris",), metric)
    trajectory = Trajectory("t", "t", (), reply)
    watched = Watched(Diagnosis((), ByteTokenizer()))
    return asyncio.run(Scorer(rewards, pool).score(task, trajectory, watched))


def test_the_weighted_sum_is_maximised_and_the_outcome_judges(pool: RewardPool) -> None:
    rewards = [
        RewardConfig(metric=f"{OWN}:is_boxed", weight=0.5),
        RewardConfig(outcome=True),
        RewardConfig(metric=f"{OWN}:by_length", weight=-2.0),
    ]
    right, wrong = (scored(pool, rewards, f"\\boxed{{{said}}}") for said in ("Paris", "Rome"))
    assert right.rewards == {"task": 1.0, "is_boxed": 1.0, "by_length": 0.05}
    assert (right.reward, right.outcome) == (pytest.approx(1.4), 1.0)
    assert (wrong.reward, wrong.outcome) == (pytest.approx(0.42), 0.0)
    assert right.score(1.0) == {"reward": 1.0, "kept": True, "rewards": right.rewards}
    assert not wrong.score(0.4)["kept"], "the outcome decides what is learned from, not the sum"
    assert reward_means([right, wrong])["reward/task/mean"] == 0.5
    assert [one.rewards for one in from_bytes(to_bytes([right, wrong]))[0]] == [right.rewards, wrong.rewards]


@pytest.mark.parametrize("metric", ["em", "memagent_reward", f"{OWN}:by_length"])
def test_without_rewards_the_task_s_metric_is_all(pool: RewardPool, metric: str) -> None:
    one = scored(pool, [], "\\boxed{Paris}", metric)
    assert one.reward == one.outcome == (0.05 if "by_length" in metric else 1.0)
    assert (one.rewards, one.reward_error, reward_means([one])) == ({}, None, {})


def test_one_that_cannot_be_scored_says_why_and_is_told_from_a_zero(pool: RewardPool) -> None:
    rewards = [RewardConfig(outcome=True), RewardConfig(metric=f"{OWN}:raises_on_idea", weight=0.1)]
    zero, unscored = scored(pool, rewards, "Rome"), scored(pool, rewards, "no idea")
    assert (zero.outcome, zero.reward_error) == (0.0, None)
    assert (unscored.reward, unscored.outcome) == (0.0, 0.0)
    assert "raised ConnectionError: the judge is away" in str(unscored.reward_error)
    assert reward_means([zero, unscored])["reward/raises_on_idea/mean"] == 1.0, "of what was scored"
    again = from_bytes(to_bytes([unscored]))[0][0]
    assert again.reward_error == unscored.reward_error


def test_a_reward_that_fails_once_is_tried_again(pool: RewardPool, tmp_path: Path) -> None:
    task = Task("t", "?", "", (str(tmp_path / "mark"),), f"{OWN}:once")
    watched = Watched(Diagnosis((), ByteTokenizer()))
    one = asyncio.run(Scorer((), pool).score(task, Trajectory("t", "t", (), "x"), watched))
    assert (one.reward, one.reward_error) == (1.0, None)


def config(tmp_path: Path, tasks: list[Task], **changes: Any) -> TrainConfig:
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    values = {
        "out": tmp_path / "run",
        "model": "tiny",
        "steps": 1,
        "data": {"path": tmp_path / "tasks.jsonl"},
        "agent": {"question": 64, "chunk": 64, "memory": 64, "answer": 64},
        "rollout": {"samples": SAMPLES, "groups": 1},
        "batch": {"optimizer_steps": 1},
        "validation": {"samples": SAMPLES},
    }
    return TrainConfig.model_validate(values | changes)


def test_a_metric_sees_the_texts_of_the_whole_episode(tmp_path: Path, pool: RewardPool) -> None:
    told = tmp_path / "told"
    task = Task("a", "Who?", "x" * 100, ("Paris",), f"{OWN}:of_everything", extra={"told": str(told)})
    settings = config(tmp_path, [task])
    client = ScriptedClient(lambda prompt, params: "So: \\boxed{Rome}" if params.max_tokens == 64 else "?")
    sampler = Sampler(settings, client, ByteTokenizer(), pool, TaskSource(settings.data, seed=0))
    (one,) = asyncio.run(sampler.group(task, [0]))
    assert one.reward == 0.3
    seen = eval(told.read_text(), {"Transcript": Transcript, "TranscriptTurn": TranscriptTurn})
    reply = "So: \\boxed{Rome}"
    assert (seen.question, seen.answers, seen.answer, seen.reply) == ("Who?", ("Paris",), "Rome", reply)
    assert [(turn.key, turn.kind, turn.reply) for turn in seen.turns] == [
        ((1,), "memory", reply), ((2,), "memory", reply), ((3,), "final", reply),
    ]  # fmt: skip
    assert all(turn.tokens > 0 and not turn.truncated for turn in seen.turns)
    assert seen.counters["model_calls"] == 3
    assert seen.extra == task.extra


REFUSED = {
    "nowhere:f": "there is no module nowhere",
    "absent.py:f": "there is no file absent.py",
    f"{OWN}:by_lenght": "did you mean by_length?",
    f"{OWN}:number": "must be a function, got 7",
    f"{OWN}:later": "is async: write def, not async def",
    f"{OWN}:one_argument": "takes (prediction), but it reads the answer, so it is called with (prediction, answers)",
    f"{OWN}:nothing": "gave None, which is not a finite number",
    f"{OWN}:not_a_number": "gave nan, which is not a finite number",
    f"{OWN}:a_text": "gave '0.5', which is not a finite number",
    f"{OWN}:slow": "took longer than 0.5 s to score",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reward_that_cannot_be_used_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    settings = config(tmp_path, [Task("a", "?", "", ("b",))], reward_seconds=0.5, rewards=[
        {"outcome": True}, {"metric": name}
    ])  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])) as raised:
        check_rewards(settings)
    assert "\n" not in str(raised.value)


def test_rewards_that_work_pass_and_are_tried_on_the_tasks_they_will_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def fine(prediction, answers):\n    return len(answers)\n\n\nalso_fine = fine\n")
    easy = {"level": "easy"}
    tasks = [Task("a", "?", "", ("b",), extra=easy), Task("b", "?", "", ("b",), f"{OWN}:nothing", extra=easy)]
    own = [{"metric": "mine:fine", "outcome": True}, {"metric": "mine.py:also_fine"}, {"metric": f"{OWN}:needs_level"}]
    assert check_rewards(config(tmp_path, tasks, rewards=own)) == []
    (doubt,) = check_rewards(config(tmp_path, [replace(tasks[0], extra={})], rewards=own))
    assert "raised KeyError: 'level', on a made-up answer" in doubt
    with pytest.raises(ValueError, match="gave None"):
        check_rewards(config(tmp_path, tasks))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([{"metric": "em"}, {"metric": "f1"}], "exactly one of rewards must have outcome: true, got 0 of 2"),
        ([{"outcome": True}, {"metric": "f1", "outcome": True}], "got 2 of 2"),
        ([{"metric": "em", "outcome": True}, {"metric": "em"}], "two of rewards are called em"),
        ([{"metric": "emm", "outcome": True}], "there is no metric 'emm'; did you mean 'em'"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(rewards: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config(tmp_path, [Task("a", "?", "", ("b",))], rewards=rewards)


def test_step_rewards_travel_between_processes() -> None:
    ids = np.arange(4, dtype=np.int32)
    spans = (Span(1, 2, "1", 0.1), Span(3, 4, "1:1:2", -2.0))
    conversation = Conversation(ids, ids > 0, np.zeros(4, np.float32), "turn", spans=spans)
    given = ScoredTrajectory(Trajectory("t", "g", (conversation, replace(conversation, spans=())), "", 1.0))
    (back,), _ = from_bytes(to_bytes([given]))
    assert [c.spans for c in back.trajectory.conversations] == [spans, ()]
    assert isinstance(back.trajectory.conversations[0].spans[0], Span)


def test_a_group_has_variance_by_its_outcome_and_not_by_the_sum(tmp_path: Path, pool: RewardPool) -> None:
    def reply(prompt: str, params: Any) -> str:
        return "yes" if params.seed % 2 else "yes, of course"

    settings = config(tmp_path, [Task("a", "Who?", "x", ("Paris",))], objective={"dynamic_sampling": True}, rewards=[
        {"outcome": True}, {"metric": f"{OWN}:by_length"}
    ])  # fmt: skip
    sampler = Sampler(settings, ScriptedClient(reply), ByteTokenizer(), pool, TaskSource(settings.data, seed=0))
    batch = sampler.collect(0)
    assert len({one.reward for one in batch.sampled}) == 2
    assert {one.outcome for one in batch.sampled} == {0.0}
    assert batch.kept == []
    metrics = batch_metrics(batch, 1.0)
    assert (
        metrics["reward/by_length/mean"]
        == pytest.approx(metrics["critic/rewards/mean"])
        == pytest.approx(0.085, abs=0.05)
    )
    assert sampler.validate([sampler.source.training(0)])[f"val/reward/mean@{SAMPLES}"] == 0


def test_a_run_with_such_a_reward_is_refused_before_it_has_a_directory(tmp_path: Path) -> None:
    settings = config(tmp_path, [Task("a", "?", "", ("b",), f"{OWN}:one_argument")])
    with pytest.raises(ValueError, match="but it reads the answer"):
        train(settings)
    assert not settings.out.exists()
