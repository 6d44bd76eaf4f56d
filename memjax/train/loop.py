"""A training run: supervised stages, then tasks to rollouts to rewards to updates to weights, over and over."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from memjax.checkpoint import hf
from memjax.checkpoint.store import TrainStore
from memjax.models.qwen2 import Params
from memjax.train.config import SupervisedStage, TrainConfig
from memjax.train.demonstrations import read_demonstrations
from memjax.train.display import Silent, Watcher
from memjax.train.learner import Model, frozen_copy, make_learner, make_supervised_update, on_host, open_model
from memjax.train.pipeline import Rollouts
from memjax.train.run import Position, Run, Stopped, config_of, last_whole
from memjax.train.scoring import check_rewards
from memjax.train.sft import stage_examples, supervised_batch
from memjax.train.step import TrainState, abstract_state, init_state, place, restarted
from memjax.train.team import by_the_first

log = logging.getLogger(__name__)


def train(config: TrainConfig, watcher: Watcher | None = None, stop: threading.Event | None = None) -> Path | None:
    """Run a config from wherever its directory stands; the exported model, or None if `stop` was set on the way."""
    watcher = watcher or Silent()
    for doubt in check_rewards(config):
        watcher.say(doubt)
    with Run(config, watcher, stop or threading.Event()) as run:
        model, params = open_model(config)
        reference = frozen_copy(model, params) if config.objective.needs_reference else None
        found = run.restore(abstract_state(model.config, model.options, config.optimizer))
        state, position = found or (init_state(params, model.config, model.options, config.optimizer), Position())
        del params, found
        try:
            while position.stage < len(config.supervised):
                state, position = supervise(run, model, state, position)
            state = reinforce(run, model, state, position, reference)
        except Stopped:
            return None
        trained = on_host(state.params)
        by_the_first(lambda: _save(run.model_directory, trained, model, config.out))
        return run.model_directory


def _save(target: Path, params: Params, model: Model, run: Path) -> None:
    try:
        hf.save(target, params, model.config, model.tokenizer)
    except OSError as error:
        raise OSError(
            f"the model could not be written to {target} ({error}), but its checkpoint is kept: make room and start "
            f"the run again, or write it elsewhere with `memjax train export {run} DIR`"
        ) from error


def export(run: Path, target: Path, *, best: bool = False) -> int:
    """Write the model of a run's last or best checkpoint as a Hugging Face directory, and say after how many steps."""
    config = config_of(run)
    model, _ = open_model(config)
    with TrainStore(run / "checkpoints", best=config.checkpoint.best, clean=False) as store:
        if best and store.best is None:
            raise ValueError(f"{run} has no best checkpoint: name what to judge them by in checkpoint.best")
        abstract = abstract_state(model.config, model.options, config.optimizer)
        if best:
            found = store.restore(abstract, asdict(Position()), store.best)
        else:
            found = last_whole(store, abstract, log.warning)
    if found is None:
        raise ValueError(f"{run} holds no checkpoint yet: it has one every checkpoint.every steps")
    _save(target, found[0].params, model, run)
    return Position(**found[1]).total(config)


def supervise(run: Run, model: Model, state: TrainState, position: Position) -> tuple[TrainState, Position]:
    """The rest of a supervised stage, and the start of the next."""
    config, stage = run.config, run.config.supervised[position.stage]
    packing = replace(config.packing(model.row_multiple), optimizer_steps=1)
    update = make_supervised_update(model, stage.optimizer)
    recorded = read_demonstrations(stage.path, model.tokenizer) if stage.path else []
    if position.step == 0:
        state = restarted(state, model.config, model.options, stage.optimizer)
    for step in range(position.step, stage.steps):
        started = time.perf_counter()
        examples = stage_examples(stage, step, config.agent, model.tokenizer, config.seed, recorded)
        state, found = update(state, place(supervised_batch(examples, packing), model.layout))
        metrics = {name: float(value) for name, value in found.items()}
        metrics["timing_s/step"] = time.perf_counter() - started
        learned = _has_learned(stage, step + 1, metrics["actor/loss"])
        position = replace(position, step=stage.steps if learned else step + 1)
        run.finish_step(state, position, metrics)
        if learned:
            break
    return state, Position(position.stage + 1, 0, position.tasks)


def _has_learned(stage: SupervisedStage, updates: int, loss: float) -> bool:
    """Whether a stage is over before its last update; ValueError where that leaves the loss too high."""
    if stage.until_loss is None:
        return False
    if updates >= stage.min_steps and loss < stage.until_loss:
        return True
    if updates == stage.steps:
        raise ValueError(
            f"stage {stage.name} has not reached a loss of {stage.until_loss} in {stage.steps} updates "
            f"({loss:.3f} at the last), and what follows needs it: try more steps, another learning rate or another "
            "seed, in another directory"
        )
    return False


def reinforce(run: Run, model: Model, state: TrainState, position: Position, reference: Params | None) -> TrainState:
    """The rest of the reinforcement learning: sample a batch, learn from it, sample with what was learned."""
    if position.step == 0:
        state = restarted(state, model.config, model.options, run.config.optimizer)
    lock = threading.Lock()
    learner = make_learner(run.config, model, reference, lock)
    with Rollouts(run, model, learner, state.params, position, lock) as rollouts:
        while position.step < run.config.steps:
            batch = rollouts.next_batch(position)
            position = position.after(batch.tasks_drawn)
            with rollouts.sampling_ahead(position):
                state, metrics = learner.learn(state, batch.trajectories)
            metrics |= {**batch.metrics, **rollouts.use(state.params), **rollouts.validate_at(position)}
            run.finish_step(state, position, metrics, rollouts.pending)
    return state
