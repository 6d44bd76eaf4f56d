"""A training run: supervised stages, then tasks to rollouts to rewards to updates to weights, over and over."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from memjax.checkpoint import hf
from memjax.checkpoint.store import TrainStore
from memjax.models.qwen2 import Params
from memjax.rewards.pool import RewardPool
from memjax.train.config import TrainConfig
from memjax.train.display import Silent, Watcher
from memjax.train.learner import (
    Model,
    frozen_copy,
    make_agent,
    make_client,
    make_learner,
    make_supervised_update,
    open_model,
    rollout_weights,
)
from memjax.train.rollouts import (
    Sampler,
    TaskSource,
    Validator,
    rollout_metrics,
    step_metrics,
    validation_tasks,
    write_rollouts,
)
from memjax.train.run import Position, Run, Stopped, config_of
from memjax.train.sft import stage_examples, supervised_batch
from memjax.train.step import TrainState, abstract_state, init_state, place


def train(config: TrainConfig, watcher: Watcher | None = None, stop: threading.Event | None = None) -> Path | None:
    """Run a config from wherever its directory stands; the exported model, or None if `stop` was set on the way."""
    with Run(config, watcher or Silent(), stop or threading.Event()) as run:
        model, params = open_model(config)
        fresh = init_state(params, model.config, model.options, config.optimizer), Position()
        abstract = abstract_state(model.config, model.options, config.optimizer)
        state, position = run.restore(abstract) or fresh
        reference = frozen_copy(model, params) if config.objective.needs_reference else None
        try:
            while position.stage < len(config.supervised):
                state, position = supervise(run, model, state, position)
            state = reinforce(run, model, state, position, reference)
        except Stopped:
            return None
        hf.save(run.model_directory, state.params, model.config, model.tokenizer)
        return run.model_directory


def export(run: Path, target: Path) -> int:
    """Write the model of a run's last checkpoint as a Hugging Face directory, and say after how many steps it is."""
    config = config_of(run)
    model, _ = open_model(config)
    with TrainStore(run / "checkpoints", clean=False) as store:
        found = store.restore(abstract_state(model.config, model.options, config.optimizer), asdict(Position()))
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
    if position.step == 0:
        state = init_state(state.params, model.config, model.options, stage.optimizer)
    for step in range(position.step, stage.steps):
        started = time.perf_counter()
        examples = stage_examples(stage, step, agent, model.tokenizer, config.seed)
        state, found = update(state, place(supervised_batch(examples, packing), model.layout))
        metrics = {name: float(value) for name, value in found.items()}
        metrics["timing_s/step"] = time.perf_counter() - started
        position = replace(position, step=step + 1)
        run.finish_step(state, position, metrics)
    return state, Position(position.stage + 1, 0, position.tasks)


def reinforce(run: Run, model: Model, state: TrainState, position: Position, reference: Params | None) -> TrainState:
    """The rest of the reinforcement learning: synchronous, every batch sampled with the weights that it updates."""
    config = run.config
    if position.step == 0:
        state = init_state(state.params, model.config, model.options, config.optimizer)
    learner, weights = make_learner(config, model, reference), rollout_weights(model)
    agent = make_agent(config, model.tokenizer, max_chunks=config.agent.max_chunks)
    client = make_client(config, model, weights(state.params))
    source, judged_by = TaskSource(config.data, config.seed), validation_tasks(config)
    with closing(client.scheduler), RewardPool() as pool:
        sampler = Sampler(agent, client, pool, source, config.rollout, config.seed)
        validator = Validator(replace(agent, max_chunks=None), client, pool, judged_by, config.validation, config.seed)
        sampler.check()
        client.warm_up()
        if position.step == 0:
            run.note(position, asyncio.run(validator.run()))
        while position.step < config.steps:
            started = time.perf_counter()
            batch = asyncio.run(sampler.collect(position.tasks, dynamic=config.objective.dynamic_sampling))
            sampled = time.perf_counter()
            metrics, alarm = rollout_metrics(batch.sampled), None
            if batch.kept:
                state, found, alarm = learner.learn(state, batch.trajectories)
                metrics |= found
                asyncio.run(client.swap_weights(weights(state.params)))
            position = Position(position.stage, position.step + 1, position.tasks + batch.tasks_drawn)
            metrics |= step_metrics(batch, sampled - started, time.perf_counter() - sampled)
            metrics["rollout/compilations"] = client.engine.compilations
            if alarm:
                run.watcher.say(alarm)
            if validator.is_due(position.step, config.steps):
                metrics |= asyncio.run(validator.run())
            if position.step % config.dump_every == 0:
                path = config.out / "rollouts" / f"step_{position.step}.jsonl"
                write_rollouts(path, batch.sampled, model.tokenizer.decode)
            run.finish_step(state, position, metrics)
    return state
