"""One evaluation from its config to its results."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memjax.agents.registry import DEFAULT
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.episodes.episode import EpisodeTokenizer
from memjax.episodes.run import check_window, longest_turn
from memjax.eval.config import EvalConfig
from memjax.eval.results import ResultsDirectory, commit, digest
from memjax.eval.run import Evaluate, Evaluator, run_jobs
from memjax.eval.scoring import PRESETS
from memjax.eval.tasks import TaskMaker, cells_of, check_metrics
from memjax.rewards.pool import RewardPool
from memjax.rollout.connect import ModelChoice, Service, choose_model, load_tokenizer, open_client
from memjax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from memjax.eval.progress import TerminalProgress
    from memjax.eval.ray_runner import RayEvaluator

_ANY_LENGTH = 1 << 40  # tokens of a text whose length is not known


async def evaluate(config: EvalConfig, watcher: TerminalProgress) -> dict[str, Any]:
    """Run what the results directory lacks and return results.json. ValueError for what the config gets wrong."""
    cells = cells_of(config)
    for name, path in config.data.items():
        kind, there = ("directory", path.is_dir()) if name == "longbench" else ("file", path.is_file())
        if not there:
            raise ValueError(f"there is no {kind} {path}, which --data {name}=PATH names")
    for doubt in check_metrics(config):
        watcher.say(doubt)
    choice = choose_model(config.model, config.url, os.environ)
    if isinstance(choice, Service) and config.window:
        choice = replace(choice, window=config.window)
    window = choice.trained_window()
    tokenizer = load_tokenizer(choice, config.tokenizer)
    if isinstance(tokenizer, EstimatedTokenizer):
        watcher.say("no --tokenizer: lengths and chunks are estimates, on the safe side")
    length, agent = conversation_tokens(config, tokenizer), config.suited_agent
    check_window(agent, "?", tokenizer, window, choice.model)  # what has no room for this has none for any question
    identity = {
        **config.identity(),
        "model": Path(choice.model).name if Path(choice.model).exists() else choice.model,
        "model_fingerprint": choice.fingerprint(),
        "prompt_hash": agent.prompt_hash,
    }
    made_by = {"commit": commit(), "config_hash": digest(identity)}
    async with AsyncExitStack() as stack:
        results = stack.enter_context(ResultsDirectory(config.out, identity))
        maker = TaskMaker(config, tokenizer, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(maker.close)
        open_here = partial(open_evaluator, config, choice, min(length, window or length), made_by)
        run: Evaluate
        if config.ray:
            run = replicas = stack.enter_context(_on_ray(open_here, config.concurrency, watcher.say))
            places = config.concurrency * replicas.replicas
            watcher.say(f"{replicas.replicas} replicas")
        else:
            run = here = open_here(tokenizer, results.journals, watcher.say)
            places = config.concurrency
            stack.push_async_callback(here.client.close)
            stack.callback(here.pool.close)
        done = [row for row in results.rows.values() if row.error is None]
        watcher.begin(cells, config.samples or config.chosen.samples, done)
        await run_jobs(maker.jobs(), run, results, places, watcher.finished)
        read = Counter(cell for cell, _ in results.rows)
        for name in [cell.name for cell in cells if read[cell.name] < (config.samples or 0)]:
            watcher.say(f"{name} has {read[name]} tasks, fewer than the {config.samples} asked for: all were read")
        return results.finish()


def open_evaluator(
    config: EvalConfig,
    choice: ModelChoice,
    length: int,
    made_by: Mapping[str, str],
    tokenizer: Tokenizer | EstimatedTokenizer | None = None,
    journals: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Evaluator:
    """The evaluator of a config with its model ready for conversations of `length` tokens, in this process."""
    tokenizer = tokenizer or load_tokenizer(choice, config.tokenizer)
    client = open_client(choice, tokenizer, length=length, slots=config.concurrency, dtype=None)
    agent, preset, identity = config.suited_agent, PRESETS[config.preset], choice.identity()
    pool = RewardPool(timeout=config.reward_seconds)
    drawn = preset, config.seed, pool, made_by, journals, config.limits, say
    return Evaluator(client, identity, agent, tokenizer, *drawn)


def conversation_tokens(config: EvalConfig, tokenizer: EpisodeTokenizer) -> int:
    """The longest conversation, prompt and reply together, that a local engine has to hold."""
    agent, longest = config.suited_agent, max(cell.tokens or _ANY_LENGTH for cell in cells_of(config))
    turn = longest_turn(agent, "?", tokenizer, longest)
    if not turn:  # an agent that cannot say gets the whole window of the model
        return config.window or _ANY_LENGTH
    need = sum(turn.values()) + getattr(agent, "question", DEFAULT.question)
    if need > _ANY_LENGTH and not config.window:
        raise ValueError(f"{config.suite} does not say how long its texts are: give --window, the most tokens to hold")
    return config.window or need


def _on_ray(open_here: Callable[[], Evaluate], concurrency: int, say: Callable[[str], None]) -> RayEvaluator:
    try:
        from memjax.eval.ray_runner import RayEvaluator
    except ImportError:
        raise ValueError("--ray needs Ray: uv sync --extra ray, or leave --ray out") from None
    return RayEvaluator(open_here, concurrency, say)
