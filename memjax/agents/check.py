"""A trial of an agent without a model: what it asks when replies are short, empty or cut, and when it is rerun."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memjax.data.token_estimate import EstimatedTokenizer
from memjax.episodes.episode import Turn, key_order
from memjax.episodes.limits import Limits
from memjax.episodes.run import Agent, run_episode
from memjax.rollout.client import Prompt
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams, Task

QUESTION = "Who keeps the lamp of the north tower?"
_FACTS = ("The lamp of the north tower is kept by Mara Venn.", "The south tower has no lamp since the great storm.")
_FILLER = "The tide came in over the flats, and the boats lay where they had been left the evening before. "

Counts = Tokenizer | EstimatedTokenizer

Replies = Callable[[Prompt, SamplingParams], str | None]
"""What the model says to a prompt; None for text until it is cut."""


def document(tokenizer: Counts, tokens: int) -> str:
    """A made-up text of about so many tokens with the answer to `QUESTION` in its middle."""
    half = max(1, tokens // 2 // tokenizer.count(_FILLER)) * _FILLER
    return f"{half}{_FACTS[0]} {half}{_FACTS[1]}"


@dataclass(frozen=True)
class Call:
    """One call that an agent made."""

    kind: str
    key: str
    prompt: int  # tokens
    max_tokens: int
    reads: int | None  # the number of the chunk that the prompt shows
    digest: str  # of all that was asked


@dataclass(frozen=True)
class Trial:
    """What an agent did with one kind of replies."""

    replies: str
    calls: tuple[Call, ...]
    answer: str
    error: str | None


@dataclass
class _Scripted:
    """Says what it is told to, and counts in the tokenizer's tokens."""

    say: Replies
    tokenizer: Counts
    window: int | None
    model: str = "the scripted model"
    asked: list[tuple[Completion, int]] = field(default_factory=list)  # replies with their most tokens

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """One reply; ValueError where it could not fit the window."""
        await asyncio.sleep(0)
        tokens, said = len(self.tokenizer.render(prompt.messages, tools=prompt.tools)), self.say(prompt, params)
        if self.window is not None and tokens + params.max_tokens > self.window:
            asked = f"a prompt of {tokens} tokens and a reply of up to {params.max_tokens}"
            raise ValueError(f"{asked} do not fit the window of {self.window}")
        words = said if said is not None else "and so it went on " * params.max_tokens
        ids = [*self.tokenizer.encode(words)]
        is_cut = said is None or len(ids) > params.max_tokens
        text = self.tokenizer.decode(ids[: params.max_tokens]) if is_cut else words
        none = np.zeros(0, np.int32)  # as a service that gives text only
        reply = Completion(
            none,
            none,
            np.zeros(0, np.float32),
            text,
            "length" if is_cut else "stop",
            prompt_tokens=tokens,
            completion_tokens=min(len(ids), params.max_tokens),
        )
        self.asked.append((reply, params.max_tokens))
        return [reply]

    async def close(self) -> None:
        """Nothing to release."""


def _short(prompt: Prompt, params: SamplingParams) -> str:
    number = hashlib.sha256(repr([m.content for m in prompt.messages]).encode()).digest()[0]
    return f"Note {number}: the lamp is kept by Mara Venn."


KINDS: tuple[tuple[str, Replies], ...] = (
    ("short", _short),
    ("short, again", _short),
    ("empty", lambda prompt, params: ""),
    ("cut", lambda prompt, params: None),
)
"""The replies of the trials, by what they are called."""


def check(agent: Agent, tokenizer: Counts, window: int | None, limits: Limits) -> tuple[list[Trial], list[str]]:
    """A trial for each kind of replies, and what is wrong in them, a sentence each."""
    chunk = getattr(agent, "chunk", None)
    text = document(tokenizer, 3 * chunk if isinstance(chunk, int) else 12_000)
    task = Task("check", QUESTION, text, answers=("Mara Venn",))
    trials = [asyncio.run(_trial(agent, task, _Scripted(say, tokenizer, window), name, limits)) for name, say in KINDS]
    return trials, [*_problems(trials)]


async def _trial(agent: Agent, task: Task, client: _Scripted, name: str, limits: Limits) -> Trial:
    turns: list[Turn] = []
    drawn = SamplingParams(temperature=1.0, seed=0)
    done = await run_episode(agent, task, client, client.tokenizer, drawn, on_turn=turns.append, limits=limits)
    most = {id(reply): tokens for reply, tokens in client.asked}
    turns.sort(key=lambda turn: key_order(turn.key))
    calls = tuple(_call(turn, most[id(turn.reply.completion)], client.tokenizer) for turn in turns)
    return Trial(name, calls, done.answer, done.error)


def _call(turn: Turn, max_tokens: int, tokenizer: Counts) -> Call:
    prompt = turn.prompt
    asked = [(m.role, m.text(tokenizer.decode), m.tool_calls, m.tool_call_id, m.name) for m in prompt.messages]
    digest = hashlib.sha256(repr((turn.key, turn.kind, asked, prompt.tools)).encode()).hexdigest()
    reads = turn.chunk.index if turn.chunk else None
    tokens = turn.reply.completion.prompt_tokens
    return Call(turn.kind, ".".join(map(str, turn.key)), tokens, max_tokens, reads, digest)


def _problems(trials: Sequence[Trial]) -> list[str]:
    found = [f"with {one.replies} replies it failed: {one.error}" for one in trials if one.error]
    first, second = trials[0], trials[1]
    if not first.error and not first.calls:
        found.append("it never called the model")
    differs = next((a for a, b in zip(first.calls, second.calls, strict=False) if a != b), None)
    if differs:
        found.append(
            f"run again it asked something else in call {differs.key} ({differs.kind}), so it could not be resumed: "
            "take random numbers from episode.random, and times and what is outside from episode.call"
        )
    elif len(first.calls) != len(second.calls):
        found.append(f"run again it made {len(second.calls)} calls instead of {len(first.calls)}: it cannot be resumed")
    return found
