"""One evaluation from its config to its results."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from memjax.agents.memagent import MemAgent
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.eval.baselines import make_agent
from memjax.eval.config import EvalConfig
from memjax.eval.judge import WINDOW_TOKENS, judge_run
from memjax.eval.results import ResultsDirectory, Row, commit, digest
from memjax.eval.run import Evaluate, Evaluator, run_jobs
from memjax.eval.scoring import PRESETS
from memjax.eval.tasks import Cell, TaskMaker, cells_of
from memjax.rewards.pool import RewardPool
from memjax.rollout.connect import ModelChoice, Service, choose_model, load_tokenizer, open_client
from memjax.tokenizer import Tokenizer

_PROMPT_WORDS = 256  # tokens allowed for prompt and chat template when a local engine is sized
_ORACLE_WINDOW = 8192  # a question's own paragraphs have about 1,500 tokens

AnyTokenizer = Tokenizer | EstimatedTokenizer


class Watcher(Protocol):
    """Whoever wants to see how far an evaluation is."""

    def say(self, message: str) -> None:
        """Something happened that a person should know."""
        ...

    def begin(self, cells: list[Cell], samples: int | None, done: Mapping[str, list[Row]]) -> None:
        """Samples are about to be read: `samples` of each cell (None: unknown), less those done in earlier runs."""
        ...

    def finished(self, row: Row) -> None:
        """A sample is on disk."""
        ...


async def evaluate(config: EvalConfig, watcher: Watcher) -> dict[str, Any]:
    """Run what the results directory lacks and return results.json. ValueError for what the config gets wrong."""
    cells = cells_of(config)
    for name, path in config.data.items():
        kind, there = ("directory", path.is_dir()) if name == "longbench" else ("file", path.is_file())
        if not there:
            raise ValueError(f"there is no {kind} {path}, which --data {name}=PATH names")
    choice = _chosen(config)
    window = choice.trained_window()
    tokenizer = load_tokenizer(choice, config.tokenizer)
    if isinstance(tokenizer, EstimatedTokenizer):
        watcher.say("no --tokenizer: lengths and chunks are estimates, on the safe side")
    prompted = make_agent(config, tokenizer)
    if isinstance(prompted.agent, MemAgent):
        prompted.agent.check_window("?", window, choice.model)  # what has no room for this has none for any question
    identity = {
        **config.identity(),
        "model": Path(choice.model).name if Path(choice.model).exists() else choice.model,
        "model_fingerprint": choice.fingerprint(),
        "prompt_hash": prompted.prompt_hash,
    }
    with ExitStack() as stack:
        results = stack.enter_context(ResultsDirectory(config.out, identity))
        maker = TaskMaker(config, tokenizer, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(maker.close)
        length = min(conversation_tokens(config), window or sys.maxsize)
        make_evaluate = partial(open_evaluator, config, choice, length, commit(), digest(identity))
        if config.ray:
            await _run_on_ray(config, cells, make_evaluate, maker, results, watcher)
        else:
            evaluator = make_evaluate(tokenizer)
            try:
                await _run(config, cells, evaluator, maker, results, watcher, config.concurrency)
            finally:
                await evaluator.close()
        return results.finish()


def open_evaluator(
    config: EvalConfig,
    choice: ModelChoice,
    length: int,
    commit: str,
    config_hash: str,
    tokenizer: AnyTokenizer | None = None,
) -> Evaluator:
    """The evaluator of a config with its model ready for conversations of `length` tokens, in this process."""
    tokenizer = tokenizer or load_tokenizer(choice, config.tokenizer)
    return Evaluator(
        client=open_client(choice, tokenizer, length=length, slots=config.concurrency, dtype=None),
        agent=make_agent(config, tokenizer).agent,
        decode=tokenizer.decode,
        preset=PRESETS[config.preset],
        pool=RewardPool(),
        commit=commit,
        config_hash=config_hash,
    )


async def judge_runs(directories: Sequence[Path], model: str | None, url: str | None, concurrency: int) -> None:
    """Let one model judge the answers of results directories. ValueError for what cannot be judged."""
    choice = choose_model(model, url, os.environ)
    length = min(WINDOW_TOKENS, choice.trained_window() or WINDOW_TOKENS)
    client = open_client(choice, load_tokenizer(choice, None), length=length, slots=concurrency, dtype=None)
    try:
        for directory in directories:
            await judge_run(directory, client, concurrency)
    finally:
        await client.close()


def conversation_tokens(config: EvalConfig) -> int:
    """The longest conversation, prompt and reply together, that a local engine has to hold."""
    budgets = config.budgets
    if config.window:
        return config.window
    around = budgets.question + budgets.answer + _PROMPT_WORDS
    match config.agent:
        case "memagent":
            return around + budgets.chunk + 2 * budgets.memory
        case "no-context":
            return around
        case "oracle":
            return _ORACLE_WINDOW + around
    tokens = [cell.tokens for cell in cells_of(config) if cell.tokens]
    if not tokens:
        raise ValueError(f"{config.suite} does not say how long its texts are: give --window, the most tokens to hold")
    return max(tokens) + around


async def _run(
    config: EvalConfig,
    cells: list[Cell],
    evaluate: Evaluate,
    maker: TaskMaker,
    results: ResultsDirectory,
    watcher: Watcher,
    concurrency: int,
) -> None:
    done: dict[str, list[Row]] = {}
    for row in results.rows.values():
        if row.error is None:
            done.setdefault(row.cell, []).append(row)
    watcher.begin(cells, config.samples or config.chosen.samples, done)
    await run_jobs(maker.jobs(), evaluate, results, concurrency, watcher.finished)
    read = Counter(cell for cell, _ in results.rows)
    for name in [cell.name for cell in cells if read[cell.name] < (config.samples or 0)]:
        watcher.say(f"{name} has {read[name]} tasks, fewer than the {config.samples} asked for: all were read")


async def _run_on_ray(
    config: EvalConfig,
    cells: list[Cell],
    make_evaluate: Callable[[], Evaluate],
    maker: TaskMaker,
    results: ResultsDirectory,
    watcher: Watcher,
) -> None:
    try:
        import ray

        from memjax.eval.ray_runner import RayEvaluator
    except ImportError:
        raise ValueError("--ray needs Ray: uv sync --extra ray, or leave --ray out") from None
    await asyncio.to_thread(ray.init, ignore_reinit_error=True, log_to_driver=False)
    with RayEvaluator(make_evaluate, config.concurrency, watcher.say) as evaluator:
        watcher.say(f"{evaluator.replicas} replicas")
        await _run(config, cells, evaluator, maker, results, watcher, config.concurrency * evaluator.replicas)


def _chosen(config: EvalConfig) -> ModelChoice:
    choice = choose_model(config.model, config.url, os.environ)
    if isinstance(choice, Service) and config.window:
        return replace(choice, window=config.window)
    return choice
