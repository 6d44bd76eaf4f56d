"""The one loop: drives an agent through an episode, and makes a trajectory of what it did."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from memjax import __version__
from memjax.data.chunks import MIN_CHUNK_TOKENS
from memjax.data.seeds import derive_seed
from memjax.episodes.acting import EnvironmentFailure
from memjax.episodes.conversations import trajectory_of
from memjax.episodes.episode import Episode, EpisodeTokenizer, JournalMismatch, Turn
from memjax.episodes.feed import Feed
from memjax.episodes.journal import EpisodeJournal, JournalError
from memjax.episodes.limits import Limits
from memjax.episodes.watchdog import watched
from memjax.own_code import OURS, hash_of_source, is_library
from memjax.rollout.client import Client, ClientError
from memjax.trajectory import SamplingParams, Task, Trajectory

Agent = Callable[[Task, Episode], Awaitable[str]]
"""An async function of a task and its episode that returns the answer."""


class AgentError(ValueError):
    """What an agent's code raised by itself; the message says where, the cause is what it was."""


@runtime_checkable
class MeasuredAgent(Protocol):
    """An agent that can say how long its longest turn may become."""

    def longest_turn(self, question: str, tokenizer: EpisodeTokenizer, document_tokens: int) -> Mapping[str, int]:
        """The most tokens by part, prompt and reply together, for a document of so many tokens."""
        ...


async def run_episode(
    agent: Agent,
    task: Task,
    client: Client,
    tokenizer: EpisodeTokenizer,
    sampling: SamplingParams,
    *,
    journal: EpisodeJournal | None = None,
    feed: Feed | None = None,
    max_chunks: int | None = None,
    on_turn: Callable[[Turn], None] | None = None,
    keep_turns: bool = True,
    limits: Limits = Limits(),
) -> Trajectory:
    """Drive `agent` through one attempt at `task`. Whatever it raises becomes the trajectory's `error`.

    Calls that the journal knows are answered from it. `sampling.seed` and the question fix every draw; without a seed
    one is drawn. Without `keep_turns` no turn is held in memory, and the trajectory has no conversations. `max_chunks`
    bounds every pass over the document, `limits` the episode.
    """
    started = time.perf_counter()
    seed = (
        journal.begin(sampling.seed, _described(agent, task, sampling, tokenizer, max_chunks))
        if journal
        else sampling.seed
    )
    if seed is None:
        seed = random.getrandbits(31)
    episode = Episode(
        task,
        client,
        tokenizer,
        sampling,
        seed=derive_seed(seed, task.question),
        recorder=journal,
        feed=feed,
        max_chunks=max_chunks,
        on_turn=on_turn,
        keep_turns=keep_turns,
        limits=limits,
    )
    answer, failure = "", None
    token = episode.enter()
    try:
        check_window(agent, task.question, tokenizer, client.window, client.model)
        with watched(_file_of(agent)):
            answer = await _within(limits.episode_seconds, agent, task, episode)
        if not isinstance(answer, str):
            raise ValueError(f"the agent returned {type(answer).__name__}, not the answer as a str")
    except Exception as raised:  # the boundary of an episode: its failure is a result and must not end the others
        answer, failure = "", _placed(_unwrapped(raised))
    except (SystemExit, asyncio.CancelledError) as raised:
        running = asyncio.current_task()
        if isinstance(raised, asyncio.CancelledError) and running and running.cancelling():
            raise
        left = ValueError(f"the agent raised {raised!r}, which would end more than its episode")
        failure = _placed(left.with_traceback(raised.__traceback__))
    finally:
        episode.exit(token)
        await episode.leave()
    seconds = time.perf_counter() - started
    trajectory = trajectory_of(
        episode.turns,
        task.id,
        task.group or task.id,
        answer=answer,
        error=None if failure is None else _told(failure),
        counters=dict(episode.counters),
        rewards=episode.rewards,
        seconds=seconds,
        failure=failure,
    )
    if journal and not isinstance(failure, JournalError | JournalMismatch):
        fields = {name: getattr(trajectory, name) for name in ("answer", "error", "counters")}
        try:
            given = {"step_rewards": [*episode.rewards.items()]} if episode.rewards else {}
            journal.end({**fields, **given, "seconds": round(seconds, 3)})
        except JournalError as full:
            return replace(trajectory, answer="", error=str(full), failure=full)
    return trajectory


def is_own_fault(failure: Exception) -> bool:
    """Whether an episode failed by what its agent did, so that another way of working would not have failed.

    That is a prompt past the window, too many calls, and whatever the agent's code raises. It is not what the machinery
    raises: a model or service that fails or takes longer than its limit, a journal, a disk or another OSError. An
    episode over its seconds is at fault itself, unless it was waiting for the model or an environment then.
    """
    if isinstance(failure, ExceptionGroup):
        return all(is_own_fault(one) for one in failure.exceptions if isinstance(one, Exception))
    return not isinstance(failure, _MACHINERY)


# An asyncio TimeoutError is an OSError.
_MACHINERY = (ClientError, EnvironmentFailure, JournalError, JournalMismatch, OSError)


async def _within(seconds: float | None, agent: Agent, task: Task, episode: Episode) -> str:
    """The agent's answer; ValueError, or ClientError if it was waiting for others, once the seconds are over."""
    was_waiting = False

    def look() -> None:
        nonlocal was_waiting
        was_waiting = episode.waiting > 0

    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, look)
    try:
        async with asyncio.timeout(seconds) as timeout:
            return await agent(task, episode)
    except TimeoutError as error:
        if not timeout.expired():
            raise
        over = f"the episode took longer than limits.episode_seconds = {seconds:g}"
        if was_waiting:
            raise ClientError(f"{over}, and was waiting for {episode.model} or an environment then") from error
        raise ValueError(f"{over}, and was waiting for nobody then: raise it, or let the agent do less") from error
    finally:
        if timer:
            timer.cancel()


def check_window(
    agent: Agent, question: str, tokenizer: EpisodeTokenizer, window: int | None, model: str, document_tokens: int = 0
) -> None:
    """ValueError, with the numbers, where the longest turn of an agent would not fit the window of the model."""
    if window is None:
        return
    parts = longest_turn(agent, question, tokenizer, document_tokens)
    over = sum(parts.values()) - window
    if over <= 0:
        return
    advice = "lower the budgets"
    if (room := parts.get("chunk", 0) - over) >= MIN_CHUNK_TOKENS:
        advice = f"lower the chunk budget to {room} or less, or the memory budget"
    listed = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
    raise ValueError(f"{listed} = {over + window} tokens, but the window of {model} holds {window}: {advice}")


def longest_turn(
    agent: Agent, question: str, tokenizer: EpisodeTokenizer, document_tokens: int = 0
) -> Mapping[str, int]:
    """The most tokens by part of one turn of an agent; empty for one that cannot say."""
    return agent.longest_turn(question, tokenizer, document_tokens) if isinstance(agent, MeasuredAgent) else {}


def _described(
    agent: Agent, task: Task, sampling: SamplingParams, tokenizer: EpisodeTokenizer, max_chunks: int | None
) -> dict[str, Any]:
    """What a drive's begin line says of it; a later drive that can use nothing is told which of these differ."""
    function = getattr(agent, "__func__", agent)  # of a bound method
    made_by = function if inspect.isfunction(function) else type(agent)
    config = agent.model_dump(mode="json") if isinstance(agent, BaseModel) else {"name": made_by.__qualname__}
    content = getattr(task.context, "fingerprint", None)
    if isinstance(task.context, str):
        content = hashlib.sha256(task.context.encode("utf-8", "replace")).hexdigest()[:32]
    drawn = {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p), "top_k": sampling.top_k}
    return {
        "memjax": __version__,
        "task": task.id,
        "question": task.question,
        "document": {"name": getattr(task.context, "name", None), "content": content},
        "agent": config,
        "code": hash_of_source(made_by),
        "prompts": getattr(agent, "prompt_hash", None),
        "sampling": {**drawn, "stop": list(sampling.stop)},
        "tokens_by": f"{type(tokenizer).__name__} {getattr(tokenizer, 'source', '')}".strip(),
        "max_chunks": max_chunks,
    }


def _file_of(agent: Agent) -> str | None:
    """The file of the code that works a task."""
    function = agent if inspect.isroutine(agent) else type(agent).__call__
    code = getattr(function, "__code__", None)
    return None if code is None else code.co_filename


def _unwrapped(failure: Exception) -> Exception:
    """The only failure of a group of one, as a TaskGroup raises it."""
    while isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    return failure


def _placed(failure: Exception) -> Exception:
    """The failure; as an AgentError, which says where, if it was raised in code that is neither ours nor installed."""
    place = None
    for frame in traceback.extract_tb(failure.__traceback__):
        if frame.filename.startswith(OURS):
            place = None  # what was called there complains of what it was given
        elif not is_library(frame.filename):
            place = f"{frame.filename}, line {frame.lineno}"
    if place is None or isinstance(failure, (*_MACHINERY, ExceptionGroup)):
        return failure
    error = AgentError(f"{_told(failure)} ({place})")
    error.__cause__ = failure
    return error


def _told(failure: Exception) -> str:
    """An error in words; one that nobody words for people has its type in front."""
    expected = isinstance(failure, ValueError | ClientError | EnvironmentFailure | OSError) and str(failure)
    return str(failure) if expected else f"{type(failure).__name__}: {failure}"
