"""A run's directory: its config, its position, its checkpoints and its log, so that it can go on wherever it stopped.

config.json     what the run was started with
checkpoints/    the last states
metrics.jsonl   a line for each step
rollouts/       some batches, to be read by people
model/          the trained model, at the end
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from memjax.checkpoint.store import TrainStore
from memjax.metrics import MetricsLog
from memjax.tokenizer_files import read_json, write_json
from memjax.train.config import TrainConfig, as_json, refuse_other_run
from memjax.train.display import Watcher
from memjax.train.step import TrainState


class Stopped(Exception):  # noqa: N818  (it is no error)
    """The run was asked to stop, and its state is kept."""


@dataclass(frozen=True)
class Position:
    """How far a run has come. With the config and the state it decides everything that follows."""

    stage: int = 0  # supervised stages first, then the reinforcement learning
    step: int = 0  # done in this stage
    tasks: int = 0  # drawn from the training order

    def total(self, config: TrainConfig) -> int:
        """Steps done in all stages."""
        return sum(stage.steps for stage in config.supervised[: self.stage]) + self.step


def config_of(out: Path) -> TrainConfig:
    """The config that a run was last started with, where its directory is now."""
    values = read_json(out / "config.json")
    if values is None:
        raise ValueError(f"{out} holds no run: give the directory that the run has as `out`")
    return TrainConfig.model_validate({**values, "out": out})


class Run:
    """An open run directory. Use as a context manager.

    Raises ValueError where the directory holds a run that this config cannot go on with. `stop`, once set, ends the run
    after the step under way.
    """

    def __init__(self, config: TrainConfig, watcher: Watcher, stop: threading.Event):
        self.config, self.watcher, self._stop = config, watcher, stop
        config.out.mkdir(parents=True, exist_ok=True)
        before = read_json(config.out / "config.json")
        if before is not None:
            refuse_other_run(before, config)
        write_json(config.out / "config.json.partial", as_json(config))
        (config.out / "config.json.partial").replace(config.out / "config.json")
        self._store = TrainStore(config.out / "checkpoints", config.checkpoint.keep)
        self._log = MetricsLog(config.out / "metrics.jsonl", self._store.latest or 0)

    @property
    def model_directory(self) -> Path:
        """Where the trained model is exported to."""
        return self.config.out / "model"

    def restore(self, abstract: TrainState) -> tuple[TrainState, Position] | None:
        """The last state and where it was reached; None in a fresh directory."""
        found = self._store.restore(abstract, asdict(Position()))
        if found is None:
            return None
        state, position = found[0], Position(**found[1])
        self.watcher.say(f"going on after step {position.total(self.config)} of {self.config.total_steps}")
        return state, position

    def note(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Log what was measured between two steps."""
        self._log.write(position.total(self.config), {"stage": self._stage_name(position), **metrics})

    def finish_step(self, state: TrainState, position: Position, metrics: Mapping[str, float]) -> None:
        """Log and show a step, and keep its state if it is time to. Raises Stopped once asked to stop."""
        config, steps = self.config, self._stage_steps(position)
        self.note(position, metrics)
        self.watcher.step(self._stage_name(position), position.step, steps, metrics)
        stopping = self._stop.is_set()
        if stopping or position.step == steps or position.step % config.checkpoint.every == 0:
            failures = self._store.failures
            self._store.save(position.total(config), state, asdict(position))
            if stopping:
                self._store.wait()
            if self._store.failures > failures:
                self.watcher.say(
                    f"A CHECKPOINT COULD NOT BE WRITTEN in {config.out}: is the disk full? Training goes on"
                )
        if stopping:
            raise Stopped

    def close(self) -> None:
        """Finish what is being written."""
        self._store.close()
        self._log.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stage_name(self, position: Position) -> str:
        stages = self.config.supervised
        return stages[position.stage].name if position.stage < len(stages) else "rl"

    def _stage_steps(self, position: Position) -> int:
        stages = self.config.supervised
        return stages[position.stage].steps if position.stage < len(stages) else self.config.steps
