"""Groups are sampled, scored and refilled as the config says, whatever fails on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memjax.agents.base import Budgets
from memjax.agents.memagent import MemAgent
from memjax.data.tasks import write_tasks
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import ClientError
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.train.config import RolloutConfig, TaskConfig, ValidationConfig
from memjax.train.rollouts import Sampler, TaskSource, Validator, batch_metrics, rollout_metrics
from memjax.trajectory import SamplingParams, Task

GOLD = "forty-two"
SAMPLES = 4
# The second scores an answer that is not there as right, which must not help a reading that failed.
METRIC = defaultdict(lambda: "em", impossible="memagent_sub_em")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=1) as pool:
        yield pool


def reply(prompt: str, params: SamplingParams) -> str:
    """Right, except on tasks that are hopeless and half of the time on tasks that are hard."""
    if "impossible" in prompt:
        raise ValueError("this prompt cannot be answered")
    assert params.seed is not None
    right = "easy" in prompt or ("hard" in prompt and params.seed % 2)
    return f"\\boxed{{{GOLD}}}" if right else "\\boxed{no idea}"


def sampler(tmp_path: Path, pool: RewardPool, kinds: str, *, dynamic: bool = False, **config: int) -> Sampler:
    """A sampler of one task for each word of `kinds`."""
    tasks = [Task(f"{i}", f"The {kind} one?", "A text.", (GOLD,), METRIC[kind]) for i, kind in enumerate(kinds.split())]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    source = TaskSource(TaskConfig(path=tmp_path / "tasks.jsonl"), seed=0)
    agent = MemAgent(ByteTokenizer(), budgets=Budgets(64, 64, 64, 64))
    return Sampler(agent, ScriptedClient(reply), pool, source, RolloutConfig(samples=SAMPLES, **config), 0, dynamic)


def test_without_dynamic_sampling_every_group_is_kept(tmp_path: Path, pool: RewardPool) -> None:
    batch = sampler(tmp_path, pool, "easy hopeless hard", groups=3).collect(0)
    assert batch.kept == batch.sampled
    assert batch.tasks_drawn == 3
    groups = [trajectory.group_id for trajectory in batch.trajectories]
    assert groups == [group for group in "012" for _ in range(SAMPLES)]
    rewards = {a.task.question.split()[1]: a.reward for a in batch.sampled if "hard" not in a.task.question}
    assert rewards == {"easy": 1, "hopeless": 0}


def test_groups_without_variance_give_way_to_the_next_tasks(tmp_path: Path, pool: RewardPool) -> None:
    many = sampler(tmp_path, pool, "easy hard " * 20, groups=4, refills=9, dynamic=True)
    batch = many.collect(0)
    assert len(batch.kept) == 4 * SAMPLES
    assert all("hard" in attempt.task.question for attempt in batch.kept)
    assert len(batch.sampled) == batch.tasks_drawn * SAMPLES
    assert batch_metrics(batch, 1.0)["rollout/groups_dropped"] == batch.tasks_drawn - 4 > 0


def test_refilling_is_bounded(tmp_path: Path, pool: RewardPool) -> None:
    batch = sampler(tmp_path, pool, "easy " * 4, groups=4, refills=2, dynamic=True).collect(0)
    assert batch.kept == []
    assert batch.tasks_drawn == 3 * 4


def test_samples_depend_on_the_task_s_number_alone(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "hard " * 8, groups=4)
    whole, later = one.collect(0), one.collect(2)
    assert [a.reward for a in whole.sampled][2 * SAMPLES :] == [a.reward for a in later.sampled][: 2 * SAMPLES]
    by_group = {tuple(a.reward for a in whole.sampled[i : i + SAMPLES]) for i in range(0, 4 * SAMPLES, SAMPLES)}
    assert len(by_group) > 1, "tasks with one question have seeds of their own"


def test_a_batch_comes_back_from_its_bytes_as_it_was(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard impossible " * 4, groups=2, refills=5, dynamic=True)
    batch = replace(one.collect(0), metrics={"a": 0.1})
    again = one.from_bytes(one.to_bytes(batch))
    assert (again.tasks_drawn, again.metrics) == (batch.tasks_drawn, {"a": 0.1})
    assert [a.task for a in again.sampled] == [a.task for a in batch.sampled]
    assert len(again.kept) == len(batch.kept) > 0
    for ours, theirs in zip(again.sampled, batch.sampled, strict=True):
        assert replace(ours.trajectory, conversations=()) == replace(theirs.trajectory, conversations=())
        assert ours.reward_error == theirs.reward_error


def test_a_share_that_was_sampled_ahead_makes_the_same_batch(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard " * 20, groups=4, refills=9, dynamic=True)
    ahead, now = one.collect(3, one.own_share(3)), one.collect(3)
    assert [(a.task.group, a.reward) for a in ahead.sampled] == [(a.task.group, a.reward) for a in now.sampled]


def test_a_failed_trajectory_scores_0_and_is_counted(tmp_path: Path, pool: RewardPool) -> None:
    batch = sampler(tmp_path, pool, "impossible easy", groups=2).collect(0)
    metrics = rollout_metrics(batch.sampled)
    assert metrics["rollout/failed"] == SAMPLES
    assert metrics["critic/rewards/mean"] == 0.5


def test_a_batch_in_which_everything_failed_ends_the_run(tmp_path: Path, pool: RewardPool) -> None:
    with pytest.raises(ClientError, match=r"none of 4 trajectories came to its end: this prompt cannot be answered"):
        sampler(tmp_path, pool, "impossible", groups=1).collect(0)


def test_validation_means_and_bests(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hopeless hard hard", groups=1)
    config = ValidationConfig(samples=SAMPLES)
    validator = Validator(one.agent, one.client, pool, one.source.first(9), config, seed=0)
    metrics = validator.run()
    assert 0.25 < metrics[f"val/reward/mean@{SAMPLES}"] < 0.75
    assert metrics[f"val/reward/best@{SAMPLES}"] == 0.75
    again = validator.run()
    assert metrics[f"val/reward/mean@{SAMPLES}"] == again[f"val/reward/mean@{SAMPLES}"]
    assert Validator(one.agent, one.client, pool, [], config, seed=0).run() == {}


def test_every_epoch_has_every_task_once_in_its_own_order(tmp_path: Path, pool: RewardPool) -> None:
    source = sampler(tmp_path, pool, "a b c d e f g h", groups=1).source
    epochs = [[source.training(epoch * 8 + i).id for i in range(8)] for epoch in range(3)]
    assert all(sorted(ids) == list("01234567") for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3
    assert [task.id for task in source.first(3)] == ["0", "1", "2"]
