"""The smallest runs that do everything, for the tests of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest

from memjax.data.tasks import write_tasks
from memjax.data.tiny import TinyTasks
from memjax.metrics import read_metrics
from memjax.train.config import TrainConfig

PROMPTS = Path(__file__).parents[2] / "memjax" / "assets" / "tiny" / "prompts"


def tiny_run(out: Path, **changes: Any) -> TrainConfig:
    """Two supervised and three other steps, each with a checkpoint; the tasks are written beside the run."""
    tasks = out.parent / "tasks.jsonl"
    if not tasks.exists():
        write_tasks(tasks, map(TinyTasks(min_chunks=2, max_chunks=2).task, range(6)))
    data = {"path": tasks, "metric": "tests.train.odd_rewards:scatter"}
    values = {
        "out": out,
        "model": "tiny",
        "compute": {"dtype": "float32", "remat": False, "scan_layers": False},
        "agent": {"question": 4, "chunk": 24, "memory": 10, "answer": 6, "prompts": PROMPTS},
        "batch": {"row_tokens": 128, "micro_batch_tokens": 512, "optimizer_steps": 2},
        "supervised": [
            {"name": "demos", "kind": "demonstrations", "steps": 2, "examples": 4, "tasks": {"max_chunks": 2}},
        ],
        "steps": 3,
        "data": data,
        # Hot enough that the replies of an untrained model differ, and with them their rewards.
        "rollout": {"groups": 2, "samples": 3, "slots": 4, "max_length": 64, "temperature": 2.0, "max_chunks": None},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "validation": {"data": data, "tasks": 2, "samples": 2, "every": 1},
        "checkpoint": {"every": 1},
        "dump_every": 1,
    }
    return TrainConfig.model_validate(values | changes)


@dataclass
class Witness:
    """A watcher that remembers."""

    said: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)

    def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((stage, step, steps))

    def say(self, message: str) -> None:
        self.said.append(message)


@dataclass(frozen=True)
class FinishedRun:
    config: TrainConfig
    witness: Witness
    model: Path

    @property
    def rows(self) -> list[dict]:
        return list(read_metrics(self.config.out / "metrics.jsonl"))


@contextmanager
def sharing_compiled(directory: Path) -> Iterator[None]:
    """Runs in this process, and in those that it starts, keep what they compile for one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(directory))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        least = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
