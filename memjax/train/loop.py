"""A training run: supervised stages, then tasks to rollouts to rewards to updates to weights, over and over."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from memjax.checkpoint import hf
from memjax.checkpoint.store import TrainStore
from memjax.models.qwen2 import Params
from memjax.rewards.pool import RewardPool
from memjax.train.attempts import Attempt
from memjax.train.config import SupervisedStage, TrainConfig
from memjax.train.display import Silent, Watcher
from memjax.train.learner import (
    Learner,
    Model,
    frozen_copy,
    make_agent,
    make_client,
    make_learner,
    make_supervised_update,
    on_host,
    on_own_part,
    open_model,
    rollout_weights,
)
from memjax.train.rollouts import (
    Collected,
    Sampler,
    TaskSource,
    Validator,
    batch_metrics,
    step_metrics,
    validation_tasks,
    write_rollouts,
)
from memjax.train.run import Position, Run, Stopped, config_of
from memjax.train.sft import stage_examples, supervised_batch
from memjax.train.step import TrainState, abstract_state, init_state, place, restarted
from memjax.train.team import by_the_first, is_first
from memjax.train.trajectory_files import read_trajectories


def train(config: TrainConfig, watcher: Watcher | None = None, stop: threading.Event | None = None) -> Path | None:
    """Run a config from wherever its directory stands; the exported model, or None if `stop` was set on the way."""
    with Run(config, watcher or Silent(), stop or threading.Event()) as run:
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
        by_the_first(lambda: hf.save(run.model_directory, trained, model.config, model.tokenizer))
        return run.model_directory


def export(run: Path, target: Path, *, best: bool = False) -> int:
    """Write the model of a run's last or best checkpoint as a Hugging Face directory, and say after how many steps."""
    config = config_of(run)
    model, _ = open_model(config)
    with TrainStore(run / "checkpoints", best=config.checkpoint.best, clean=False) as store:
        if best and store.best is None:
            raise ValueError(f"{run} has no best checkpoint: name what to judge them by in checkpoint.best")
        abstract = abstract_state(model.config, model.options, config.optimizer)
        found = store.restore(abstract, asdict(Position()), store.best if best else None)
    if found is None:
        raise ValueError(f"{run} holds no checkpoint yet: it has one every checkpoint.every steps")
    hf.save(target, found[0].params, model.config, model.tokenizer)
    return Position(**found[1]).total(config)


def supervise(run: Run, model: Model, state: TrainState, position: Position) -> tuple[TrainState, Position]:
    """The rest of a supervised stage, and the start of the next."""
    config, stage = run.config, run.config.supervised[position.stage]
    agent = make_agent(config, model.tokenizer, max_chunks=config.agent.max_chunks)
    packing = replace(config.packing(model.row_multiple), optimizer_steps=1)
    update = make_supervised_update(model, stage.optimizer)
    readings = read_trajectories(stage.path, model.tokenizer) if stage.path else []
    if position.step == 0:
        state = restarted(state, model.config, model.options, stage.optimizer)
    for step in range(position.step, stage.steps):
        started = time.perf_counter()
        examples = stage_examples(stage, step, agent, model.tokenizer, config.seed, readings)
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
    """The rest of the reinforcement learning.

    Every batch is sampled with the weights that it updates or, with `rollout_ahead`, while the batch before it updates
    them; its log-probabilities are those of the weights that sampled it either way.
    """
    config = run.config
    if position.step == 0:
        state = restarted(state, model.config, model.options, config.optimizer)
    turn = threading.Lock()
    learner, weights_of = make_learner(config, model, reference, turn), rollout_weights(model)
    weights = weights_of(state.params)
    agent = make_agent(config, model.tokenizer, max_chunks=config.agent.max_chunks)
    client = make_client(config, model, weights, turn)
    source, judged_by = TaskSource(config.data, config.seed), validation_tasks(config)
    dynamic = config.objective.dynamic_sampling
    with closing(client.scheduler), RewardPool() as pool, ThreadPoolExecutor(1, "rollout") as beside:
        sampler = Sampler(agent, client, pool, source, config.rollout, config.seed, dynamic)
        validator = Validator(replace(agent, max_chunks=None), client, pool, judged_by, config.validation, config.seed)
        sampler.check()
        client.warm_up()
        kept = run.pending(position)
        batch = sampler.from_bytes(kept) if kept else None
        if position.step == 0:
            run.note(position, validator.run())
        first, idle = position.step, 0  # steps that changed nothing
        while position.step < config.steps:
            started = time.perf_counter()
            batch = batch or _collect(run, sampler, learner, weights, position.tasks, started)
            position = Position(position.stage, position.step + 1, position.tasks + batch.tasks_drawn)
            is_ahead = config.rollout_ahead and position.step < config.steps
            begun = time.perf_counter()
            share = beside.submit(sampler.own_share, position.tasks) if is_ahead else None
            state, found = learner.learn(state, batch.trajectories) if batch.kept else (state, {})
            metrics = {**found, **batch.metrics, "timing_s/update_actor": time.perf_counter() - begun}
            following = _collect(run, sampler, learner, weights, position.tasks, begun, share) if share else None
            weights = weights_of(state.params)
            asyncio.run(client.swap_weights(on_own_part(model, weights)))
            metrics |= step_metrics(batch, time.perf_counter() - started)
            metrics["rollout/compilations"] = client.engine.compilations
            if validator.is_due(position.step, config.steps):
                metrics |= validator.run()
            if position.step % config.dump_every == 0 and is_first():
                path = config.out / "rollouts" / f"step_{position.step}.jsonl"
                write_rollouts(path, batch.sampled, model.tokenizer.decode)
            run.finish_step(state, position, metrics, partial(sampler.to_bytes, following) if following else None)
            idle += not batch.kept
            batch = following
    if idle:
        run.watcher.say(
            f"{idle} of {config.steps - first} steps changed nothing: in each of their groups all answers had the same "
            "reward. Harder or longer tasks, more rollout.samples or more rollout.refills give something to learn."
        )
    return state


def _collect(
    run: Run,
    sampler: Sampler,
    learner: Learner,
    weights: Params,
    first: int,
    started: float,
    share: Future[list[Attempt]] | None = None,
) -> Collected:
    """A batch from task number `first` on, sampled since `started` with `weights`, against which it is checked."""
    batch = sampler.collect(first, share.result() if share else None)
    metrics = batch_metrics(batch, time.perf_counter() - started)
    if batch.kept:
        found, alarm = learner.compare(weights, batch.trajectories)
        metrics |= found
        if alarm:
            run.watcher.say(alarm)
    return replace(batch, metrics=metrics)
