"""A run's directory: its config, its position, its checkpoints and its log, so that it can go on wherever it stopped.

config.json     what the run was started with
code.json       hashes of the user's code that this names
checkpoints/    the last states, and the best
damaged/        checkpoints that could not be read, moved out of the way
pending/        batches that were sampled ahead, one beside each checkpoint
metrics.jsonl   a line for each step
rollouts/       the episodes of some batches, a journal of each process
model/          the trained model, at the end
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from pydantic import ValidationError

from memjax.checkpoint.store import TrainStore
from memjax.config import config_error
from memjax.rollout.connect import LocalModel
from memjax.tokenizer_files import read_json
from memjax.train.config import FRESH_MODELS, TrainConfig, as_json, code_of, refuse_other_run
from memjax.train.display import Silent, Watcher
from memjax.train.logs import Log, Unwritten, open_logs
from memjax.train.step import TrainState
from memjax.train.team import anywhere, by_the_first, is_first
from memjax.whole_file import lock_directory, write_whole


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

    def after(self, tasks_drawn: int) -> Position:
        """The position one step later."""
        return Position(self.stage, self.step + 1, self.tasks + tasks_drawn)


def config_of(out: Path) -> TrainConfig:
    """The config that a run was last started with, where its directory is now, and without code of the user's.

    That may lie elsewhere by now, or be found from another directory only: the agent, the objective and what stages
    learn from have their defaults. ValueError where it cannot be read.
    """
    values = read_json(out / "config.json")
    if values is None:
        raise ValueError(f"{out} holds no run: give the directory that the run has as `out`")
    stages = [stage | {"kind": "recall", "path": None} for stage in values.get("supervised", ())]
    kept = {key: value for key, value in values.items() if key not in ("agent", "objective", "preset")}
    try:
        return TrainConfig.model_validate(kept | {"out": out, "supervised": stages})
    except ValidationError as error:
        raise ValueError(f"{out / 'config.json'} cannot be read: {config_error(error)}") from None


def last_whole(
    store: TrainStore, abstract: TrainState, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, int]] | None:
    """The last checkpoint that every process can read; says which it passes over. None where there is none.

    ValueError, which names all of them, where none can be read.
    """
    reasons: list[str] = []
    for step in reversed(store.steps):
        found, reason = None, "another process cannot read it"
        try:
            found = store.restore(abstract, asdict(Position()), step)
        except ValueError as error:
            reason = str(error)
        if not anywhere(found is None):
            for passed in reasons:
                say(f"{passed}; GOING ON FROM CHECKPOINT {step}")
            return found
        reasons.append(reason)
    if reasons:
        raise ValueError(
            f"{'; '.join(reasons)}: choose another directory with out=DIR, or, if they are damaged, remove these "
            "directories to begin anew"
        )
    return None


class Run:
    """An open run directory. Use as a context manager; of several processes each has one, and the first writes.

    Raises ValueError where the directory holds a run that this config cannot go on with. `stop`, once set in any
    process, ends the run in all of them after the step under way.
    """

    def __init__(self, config: TrainConfig, watcher: Watcher, stop: threading.Event):
        self.config, self._stop = config, stop
        self.watcher = watcher if is_first() else Silent()
        with ExitStack() as stack:
            by_the_first(lambda: self._prepare(stack))
            self.unwritten = Unwritten(self.watcher.say)
            self._store = TrainStore(config.out / "checkpoints", config.checkpoint.keep, best=config.checkpoint.best)
            stack.callback(self._store.close)
            self._logs: list[Log] = []
            by_the_first(lambda: self._logs.extend(open_logs(config, self._store.latest or 0)))
            stack.callback(self._close_logs)
            self._open = stack.pop_all()

    @property
    def model_directory(self) -> Path:
        """Where the trained model is exported to."""
        return self.config.out / "model"

    def restore(self, abstract: TrainState) -> tuple[TrainState, Position] | None:
        """The last state that can be read and where it was reached; None in a fresh directory.

        Damaged checkpoints after it are moved to `damaged/`. ValueError where there are checkpoints and none is whole.
        """
        last = self._store.latest
        found = last_whole(self._store, abstract, self.watcher.say)
        if found is None:
            return None
        state, position = found[0], Position(**found[1])
        if (total := position.total(self.config)) != last:
            by_the_first(lambda: self._set_aside(total))
            self._store.reopen()
        self.watcher.say(f"going on after step {position.total(self.config)} of {self.config.total_steps}")
        return state, position

    def pending(self, position: Position) -> bytes | None:
        """The batch that was sampled ahead when the checkpoint at `position` was written."""
        path = self._pending_path(position.total(self.config))
        if path.exists():
            return path.read_bytes()
        if self.config.rollout_ahead and 0 < position.step < self.config.steps:
            self.watcher.say(
                f"{path}, the batch that was sampled ahead, is gone: it is sampled anew with the weights of now, so "
                "that this run will differ from one that was never stopped"
            )
        return None

    def note(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Log what was measured between two steps."""
        row = {"stage": self._stage_name(position), **metrics}
        row["disk/failed_writes"] = self.unwritten.count + self._store.failures
        for log in self._logs:
            with self.unwritten.guarding(f"A LINE OF {type(log).__name__}"):
                log.write(position.total(self.config), row)

    def dump_file(self, step: int) -> Path | None:
        """Where this process writes the episodes of a step, emptied of what a killed run left; None if nowhere."""
        if step % self.config.dump_every:
            return None
        process = "" if is_first() else f".process_{jax.process_index()}"
        path = self.config.out / "rollouts" / f"step_{step}{process}.jsonl"
        path.unlink(missing_ok=True)
        return path

    def finish_step(
        self,
        state: TrainState,
        position: Position,
        metrics: Mapping[str, float],
        pending: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        """Log and show a step, and keep its state if it is time to. Raises Stopped once asked to stop.

        `pending` makes the bytes of a batch that is sampled and not yet learned from, if there is one.
        """
        config, steps = self.config, self._stage_steps(position)
        self.note(position, metrics)
        self.watcher.step(self._stage_name(position), position.step, steps, metrics)
        stopping = anywhere(self._stop.is_set())
        value = metrics.get(config.checkpoint.best) if config.checkpoint.best else None
        is_last = stopping or position.step == steps
        if is_last or position.step % config.checkpoint.every == 0 or self._store.is_best(value):
            self._keep(state, position, value, pending, wait=is_last)
        if stopping:
            raise Stopped

    def _keep(
        self,
        state: TrainState,
        position: Position,
        value: float | None,
        pending: Callable[[], bytes | None],
        *,
        wait: bool,
    ) -> None:
        failures, total = self._store.failures, position.total(self.config)
        self._store.wait()  # what is being written counts as whole in `steps`
        try:
            by_the_first(lambda: self._write_pending(total, pending()))
            self._store.save(total, state, asdict(position), value, wait=wait)
        except (OSError, ValueError) as error:  # the boundary to the disk: a run must not end because it is full
            self.watcher.say(str(error))
            self._store.failures += 1
        if self._store.failures > failures:
            self.watcher.say(
                f"A CHECKPOINT COULD NOT BE WRITTEN in {self.config.out}: is the disk full? Training goes on"
            )

    def _set_aside(self, reached: int) -> None:
        """Move the checkpoints after step `reached` out of the way, and drop their lines, which come again."""
        for step in self._store.steps:
            if step > reached:
                self._store.set_aside(step, self.config.out / "damaged")
                self.watcher.say(f"the damaged checkpoint {step} is in {self.config.out / 'damaged'} now: remove it")
        self._close_logs()
        self._logs.extend(open_logs(self.config, reached))

    def _close_logs(self) -> None:
        while self._logs:
            with self.unwritten.guarding("THE END OF A LOG"):
                self._logs.pop().close()

    def _prepare(self, stack: ExitStack) -> None:
        """Take the directory and write the config, unless it holds another run."""
        out = self.config.out
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_directory(out, "wait for it, stop it, or choose another directory with out=DIR"))
        before = read_json(out / "config.json")
        if before is not None:
            refuse_other_run(before, self.config)
            dtype, now = before.get("compute", {}).get("dtype"), self.config.compute.dtype
            if dtype != now:
                self.watcher.say(
                    f"compute.dtype was {dtype} and is {now} now: from here on numbers are rounded otherwise"
                )
        for directory in (out / "checkpoints").glob("*"):
            if directory.name.isdecimal() and not any(directory.iterdir()):
                directory.rmdir()  # no checkpoint, but in the way of one
        code, known = code_of(self.config), read_json(out / "code.json") or {}
        if self.config.objective.needs_reference and self.config.model not in FRESH_MODELS:
            reference = f"reference {self.config.model}"
            code[reference] = LocalModel(self.config.model).fingerprint()
            if known.get(reference, code[reference]) != code[reference]:
                raise ValueError(
                    f"{self.config.model} is what objective.kl_coef compares with, and has other weights than when "
                    "this run was started: put them back, or choose another directory with out=DIR"
                )
        for name in code:
            if known.get(name, code[name]) != code[name]:
                self.watcher.say(
                    f"the code or prompts of {name} have changed since this run was last started: it goes on with "
                    "those of now, and has learned with the former"
                )
        for file, values in (("config.json", as_json(self.config)), ("code.json", code)):
            write_whole(out / file, json.dumps(values, ensure_ascii=False, indent=2) + "\n")

    def _pending_path(self, total: int) -> Path:
        return self.config.out / "pending" / f"{total}.npz"

    def _write_pending(self, total: int, data: bytes | None) -> None:
        """Write a batch beside the checkpoint to come, and drop those whose checkpoints are gone."""
        if data is None:
            return
        path = self._pending_path(total)
        path.parent.mkdir(exist_ok=True)
        for other in path.parent.glob("*.npz"):
            if int(other.stem) not in self._store.steps:
                other.unlink()
        write_whole(path, data)

    def close(self) -> None:
        """Finish what is being written, and let go of the directory."""
        self._open.close()

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
