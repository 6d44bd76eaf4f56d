"""Reading one document for one or several questions, with a state on disk from which it can go on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from memjax import __version__
from memjax.agents.base import AgentTokenizer, Budgets, Turn, generation_counters
from memjax.agents.memagent import MemAgent, Reading
from memjax.agents.prompt_files import load_memory_prompts
from memjax.agents.single import SingleAgent
from memjax.data.chunks import MIN_CHUNK_TOKENS, Chunk
from memjax.data.documents import Document
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import Client
from memjax.trajectory import SamplingParams
from memjax.whole_file import write_whole

Result = TypeVar("Result")


class AskSettings(BaseModel):
    """What `memjax ask` was asked to do, in full: a resumed run takes it from the state file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    model: str | None = None
    url: str | None = None
    tokenizer: str | None = None
    agent: Literal["memagent", "single"] = "memagent"
    question_tokens: int = Field(default=1024, ge=1)
    chunk_tokens: int = Field(default=5000, ge=MIN_CHUNK_TOKENS)
    memory_tokens: int = Field(default=1024, ge=1)
    answer_tokens: int = Field(default=1024, ge=1)
    layout: str = "memory_first"
    prompts: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    slots: int | None = Field(default=None, ge=1)

    @property
    def budgets(self) -> Budgets:
        """The token budgets, checked."""
        return Budgets(self.question_tokens, self.chunk_tokens, self.memory_tokens, self.answer_tokens)

    @property
    def sampling(self) -> SamplingParams:
        """How to draw, checked."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)

    def memory_agent(self, tokenizer: AgentTokenizer) -> MemAgent:
        """The agent that reads in chunks."""
        return MemAgent(tokenizer, load_memory_prompts(self.layout, self.prompts), self.budgets, self.sampling)

    def single_agent(self, tokenizer: AgentTokenizer) -> SingleAgent:
        """The agent that reads at once."""
        return SingleAgent(tokenizer, budgets=self.budgets, sampling=self.sampling)


# Files and models are compared by content, a service by its model's name; slots change only the speed.
_NOT_COMPARED = {"files", "model", "url", "tokenizer", "prompts", "slots"}


def compared_settings(settings: AskSettings) -> dict[str, JsonValue]:
    """The settings that must be the same for a reading to be resumed."""
    return settings.model_dump(mode="json", exclude=_NOT_COMPARED)


def identity(settings: AskSettings, document: Document, prompt_digest: str, model: str) -> dict[str, JsonValue]:
    """Everything that the answer depends on; a reading is resumed only where all of it is the same."""
    found: dict[str, JsonValue] = {"document": document.fingerprint, "prompts": prompt_digest, "model": model}
    return compared_settings(settings) | found


def fitted(
    settings: AskSettings, chosen: Collection[str], tokenizer: AgentTokenizer, window: int | None
) -> AskSettings:
    """The settings with those budgets lowered that nobody chose, as far as a small window asks for it.

    Memory and answer get at most an eighth of the window each, the chunk what is left.
    """
    if window is None or settings.agent == "single":
        return settings
    eighth = max(32, window // 8)
    lowered = {name: min(getattr(settings, name), eighth) for name in ("memory_tokens", "answer_tokens")}
    settings = settings.model_copy(update={name: n for name, n in lowered.items() if name not in chosen})
    agent = settings.memory_agent(tokenizer)
    over = max(agent.window_needed(question) for question in settings.questions) - window
    if over > 0 and "chunk_tokens" not in chosen:
        chunk = max(MIN_CHUNK_TOKENS, settings.chunk_tokens - over)
        settings = settings.model_copy(update={"chunk_tokens": chunk})
    return settings


class AskState(BaseModel):
    """How far a reading is: what the state file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memjax: str = __version__
    settings: AskSettings
    identity: dict[str, JsonValue]
    readings: tuple[Reading, ...]
    document_tokens: int = 0
    seconds: float = 0.0
    counters: dict[str, float] = {}
    answers: tuple[str, ...] | None = None  # None until the reading is done

    @property
    def chunks_read(self) -> int:
        """How many chunks every question has read."""
        return self.readings[0].chunks_read if self.readings else 0


def state_directory() -> Path:
    """Where states are kept of which nobody said where."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "memjax" / "ask"


def save_state(path: Path, state: AskState) -> None:
    """Write the state; a crash at any moment leaves either the one before or this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, state.model_dump_json(indent=1))


def load_state(path: Path) -> AskState:
    """Read a state file. Raises ValueError where there is none, or it is something else."""
    try:
        return AskState.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"there is no state file {path} to resume from: without --state they are in {state_directory()}"
        ) from None
    except (ValidationError, UnicodeDecodeError):
        raise ValueError(f"{path} is no state file of memjax ask, or a damaged one: start without --resume") from None


def check_same(path: Path, state: AskState, now: dict[str, JsonValue], files: Sequence[str]) -> None:
    """ValueError, naming what differs, where reading `files` on would not be the reading that was begun."""
    if state.identity.get("document") != now.get("document"):
        begun = _named(state.settings.files)
        told = (
            f"{begun} has changed since it was read ({path}): restore it"
            if tuple(files) == state.settings.files
            else f"{path} is a reading of {begun}, and {_named(files)} is another text: name the one it began with"
        )
        raise ValueError(f"{told}, or start without --resume")
    changed = [name for name in state.identity | now if state.identity.get(name) != now.get(name)]
    if changed:
        listed = "; ".join(
            f"{name} was {_short(state.identity.get(name))}, is {_short(now.get(name))}" for name in changed
        )
        raise ValueError(f"{path} belongs to another reading ({listed}): make them equal, or start without --resume")


@dataclass(frozen=True)
class Step:
    """One chunk, or the answers (chunk None): what the model was asked and said, per question."""

    state: AskState
    turns: tuple[Turn, ...]
    chunk: Chunk | None


OnStep = Callable[[Step], None]


def trace_records(step: Step, decode: Callable[[Sequence[int]], str]) -> Iterator[dict[str, JsonValue]]:
    """What each question's call was asked and said, as lines of a trace file, which `memjax view` shows."""
    state = step.state
    readings = state.readings or tuple(Reading(question) for question in state.settings.questions)
    for reading, turn in zip(readings, step.turns, strict=True):
        completion = turn.completion
        yield {
            "question": reading.question,
            "kind": turn.kind,
            "chunk": step.chunk.index if step.chunk else None,
            "tokens_read": state.document_tokens,
            "document_tokens": max(step.chunk.document_tokens if step.chunk else 0, state.document_tokens),
            "memory": reading.memory_text,
            "answer": None if step.chunk else extract_answer(completion.text),
            "prompt": [{"role": message.role, "content": message.text(decode)} for message in turn.prompt.messages],
            "reply": completion.text,
            "token_ids": completion.token_ids.tolist(),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": completion.completion_tokens,
            "seconds": round(completion.seconds, 3),
        }


def report(state: AskState, path: Path | None) -> dict[str, JsonValue]:
    """The outcome of a finished reading, for --json."""
    readings = state.readings or tuple(Reading(question) for question in state.settings.questions)
    return {
        "answers": [
            {
                "question": reading.question,
                "answer": extract_answer(text),
                "reply": text,
                "memory": reading.memory_text,
                "empty_updates": reading.empty_updates,
                "truncated_memories": reading.truncated_memories,
            }
            for reading, text in zip(readings, state.answers or (), strict=True)
        ],
        "document_tokens": state.document_tokens,
        "chunks": state.chunks_read,
        "seconds": round(state.seconds, 3),
        "counters": dict(state.counters),
        "settings": state.settings.model_dump(mode="json"),
        "identity": state.identity,
        "memjax": state.memjax,
        "state": str(path) if path else None,
    }


async def read_and_answer(
    agent: MemAgent, document: Document, client: Client, state: AskState, path: Path, on_step: OnStep
) -> AskState:
    """Go on reading where `state` is, every question at the same chunk, and answer; the state is saved at each step."""
    rest = islice(agent.chunks(document), state.chunks_read, None)
    return await read_rest_and_answer(agent, rest, client, state, path, on_step)


async def read_rest_and_answer(
    agent: MemAgent, rest: Iterable[Chunk], client: Client, state: AskState, path: Path, on_step: OnStep
) -> AskState:
    """As `read_and_answer`, over the chunks that are still to be read."""
    save_state(path, state)
    for chunk in rest:
        started = time.perf_counter()
        results = await _together(agent.read_chunk(reading, chunk, client) for reading in state.readings)
        turns = [turn for _, turn in results]
        state = _after(state, turns, time.perf_counter() - started).model_copy(
            update={
                "readings": tuple(reading for reading, _ in results),
                "document_tokens": chunk.start_token + len(chunk.ids),
            }
        )
        save_state(path, state)
        on_step(Step(state, tuple(turns), chunk))
    started = time.perf_counter()
    turns = await _together(agent.answer(reading, client) for reading in state.readings)
    state = _after(state, turns, time.perf_counter() - started).model_copy(
        update={"answers": tuple(turn.completion.text for turn in turns)}
    )
    save_state(path, state)
    on_step(Step(state, tuple(turns), None))
    return state


async def answer_at_once(
    agent: SingleAgent, document: Document, client: Client, state: AskState, on_step: OnStep
) -> AskState:
    """Show the model the whole document for each question."""
    started = time.perf_counter()
    longest = max(state.settings.questions, key=agent.tokenizer.count)
    ids = agent.fitting_text(document, longest, client.window, client.model)
    turns = await _together(agent.answer(ids, question, client) for question in state.settings.questions)
    state = _after(state, turns, time.perf_counter() - started).model_copy(
        update={"answers": tuple(turn.completion.text for turn in turns), "document_tokens": len(ids)}
    )
    on_step(Step(state, tuple(turns), None))
    return state


def _after(state: AskState, turns: Sequence[Turn], seconds: float) -> AskState:
    counted = generation_counters(turns)
    counters = {name: state.counters.get(name, 0) + value for name, value in counted.items()}
    return state.model_copy(update={"counters": counters, "seconds": state.seconds + seconds})


async def _together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results; the first failure cancels the others, so that none goes on behind an error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _short(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _named(files: Sequence[str]) -> str:
    return ", ".join("standard input" if name == "-" else Path(name).name for name in files)
