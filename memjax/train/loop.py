"""A training run: supervised stages, then tasks to rollouts to rewards to updates to weights, over and over."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from memjax.checkpoint import hf
from memjax.checkpoint.store import TrainStore
from memjax.models.qwen2 import Params
from memjax.rewards.pool import RewardPool
from memjax.train.config import SupervisedStage, TrainConfig
from memjax.train.demonstrations import read_demonstrations
from memjax.train.display import Silent, Watcher
from memjax.train.learner import (
    Learner,
    Model,
    frozen_copy,
    make_client,
    make_learner,
    make_supervised_update,
    on_host,
    on_own_part,
    open_model,
    rollout_weights,
)
from memjax.train.rollouts import RolloutBatch, Sampler, TaskSource, batch_metrics
from memjax.train.run import Position, Run, Stopped, config_of
from memjax.train.scored import from_bytes, to_bytes
from memjax.train.scoring import check_rewards
from memjax.train.sft import stage_examples, supervised_batch
from memjax.train.step import TrainState, abstract_state, init_state, place, restarted
from memjax.train.team import by_the_first


def train(config: TrainConfig, watcher: Watcher | None = None, stop: threading.Event | None = None) -> Path | None:
    """Run a config from wherever its directory stands; the exported model, or None if `stop` was set on the way."""
    check_rewards(config)
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
    client = make_client(config, model, weights, turn)
    judging = config.validation
    with (
        closing(client.scheduler),
        RewardPool(timeout=config.reward_seconds) as pool,
        ThreadPoolExecutor(1, "rollout") as beside,
    ):
        source = TaskSource(config.data, config.seed)
        judged_by = TaskSource(judging.data, config.seed).first(judging.tasks) if judging.data else []
        sampler = Sampler(config, client, model.tokenizer, pool, source)
        sampler.check()
        client.warm_up()
        kept = run.pending(position)
        batch = sampler.batch(*from_bytes(kept)) if kept else None
        if position.step == 0:
            run.note(position, sampler.validate(judged_by))
        first, idle = position.step, 0  # steps that changed nothing
        while position.step < config.steps:
            started = time.perf_counter()
            if batch is None:
                sampled = sampler.collect(position.tasks, dump=run.dump_file(position.step + 1))
                batch = _measured(sampled, run, learner, weights, started)
            position = Position(position.stage, position.step + 1, position.tasks + batch.tasks_drawn)
            begun, following = time.perf_counter(), None
            is_ahead = config.rollout_ahead and position.step < config.steps
            dump = run.dump_file(position.step + 1) if is_ahead else None
            share = beside.submit(sampler.local_groups, position.tasks, dump=dump) if is_ahead else None
            state, found = learner.learn(state, batch.trajectories) if batch.kept else (state, {})
            metrics = {**found, **batch.metrics, "timing_s/update_actor": time.perf_counter() - begun}
            if share:
                sampled = sampler.collect(position.tasks, share.result(), dump)
                following = _measured(sampled, run, learner, weights, begun)
            weights = weights_of(state.params)
            asyncio.run(client.swap_weights(on_own_part(model, weights)))
            metrics["timing_s/step"] = time.perf_counter() - started
            metrics["perf/throughput"] = metrics["rollout/tokens"] / metrics["timing_s/step"]
            metrics["rollout/compilations"] = client.engine.compilations
            if position.step % judging.every == 0 or position.step == config.steps:
                metrics |= sampler.validate(judged_by)
            pending = partial(to_bytes, following.sampled, following.metrics) if following else None
            run.finish_step(state, position, metrics, pending)
            idle += not batch.kept
            batch = following
    if idle:
        run.watcher.say(
            f"{idle} of {config.steps - first} steps changed nothing: in each of their groups all answers had the same "
            "reward. Harder or longer tasks, more rollout.samples or more rollout.refills give something to learn."
        )
    return state


def _measured(batch: RolloutBatch, run: Run, learner: Learner, weights: Params, started: float) -> RolloutBatch:
    """The batch, sampled since `started` with `weights`, with its metrics; says so where the learner disagrees."""
    metrics = batch_metrics(batch, time.perf_counter() - started)
    if batch.kept:
        found, alarm = learner.compare(weights, batch.trajectories)
        metrics |= found
        if alarm:
            run.watcher.say(alarm)
    return replace(batch, metrics=metrics)
