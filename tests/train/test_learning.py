"""The loop learns what is rewarded, and nothing when rewards are dealt out at random. One fixed seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from memjax.data.tasks import write_tasks
from memjax.data.tiny import TinyTasks
from memjax.metrics import read_metrics
from memjax.train.loop import train
from memjax.train.rollouts import RolloutBatch, Sampler
from memjax.train.scored import ScoredTrajectory
from tests.train.tiny_run import tiny_run

STEPS = 10
MARGIN = 0.3


def sampled_rewards(directory: Path) -> tuple[float, float]:
    """Mean reward of sampled validation answers before and after: a model that knows the form of an answer and no
    value of it is to learn that even values are wanted."""
    tasks = directory / "even.jsonl"
    write_tasks(tasks, map(TinyTasks(max_chunks=1).task, range(64)))
    data = {"path": tasks, "metric": "tests.train.odd_rewards:even_value"}
    config = tiny_run(
        directory / "run",
        supervised=[
            {
                "name": "form",
                "kind": "demonstrations",
                "steps": 60,
                "examples": 16,
                "tasks": {"max_chunks": 1},
                "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5},
            }
        ],
        steps=STEPS,
        data=data,
        batch={"row_tokens": 128, "micro_batch_tokens": 2048, "optimizer_steps": 2},
        rollout={"groups": 16, "samples": 8, "slots": 64, "max_length": 64},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 0},
        validation={"data": data, "tasks": 32, "samples": 4, "every": STEPS, "top_p": 1.0},
        checkpoint={"every": 100},
        dump_every=100,
    )
    train(config)
    validated = [row["val/reward/mean@4"] for row in read_metrics(config.out / "metrics.jsonl") if "val/failed" in row]
    return validated[0], validated[-1]


@pytest.mark.slow
def test_sampled_reward_rises(tmp_path: Path) -> None:
    before, after = sampled_rewards(tmp_path)
    assert after > before + MARGIN


@pytest.mark.slow
def test_sampled_reward_does_not_rise_when_rewards_are_shuffled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, rng = Sampler.collect, random.Random(0)

    def shuffled(
        sampler: Sampler,
        first: int,
        share: Sequence[ScoredTrajectory] | None = None,
        dump: Path | None = None,
    ) -> RolloutBatch:
        batch = collect(sampler, first, share, dump)
        rewards = [one.reward for one in batch.kept]
        rng.shuffle(rewards)
        return replace(
            batch,
            kept=[
                replace(one, trajectory=replace(one.trajectory, reward=reward))
                for one, reward in zip(batch.kept, rewards, strict=True)
            ],
        )

    monkeypatch.setattr(Sampler, "collect", shuffled)
    before, after = sampled_rewards(tmp_path)
    assert after < before + MARGIN  # of a walk at random, which ten steps are
