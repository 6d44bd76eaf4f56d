"""From the turns of an episode to its trajectory: the conversations that a learner trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from memjax.episodes.episode import Key, Turn, key_order
from memjax.trajectory import Conversation, Span, Trajectory

_NO_REWARDS: Mapping[Key, float] = MappingProxyType({})
_TAIL = 8  # ids at the end of a conversation by which a prompt that repeats it is found


def trajectory_of(
    turns: Iterable[Turn],
    task: str,
    group: str,
    *,
    counters: Mapping[str, float],
    rewards: Mapping[Key, float] = _NO_REWARDS,
    **fields: Any,
) -> Trajectory:
    """The trajectory that the turns of an attempt at a task make; `fields` are its answer and what else is known.

    `rewards` are those that single turns have, by key.
    """
    conversations, broken = conversations_of(turns, rewards)
    counted = {**counters, "broken_conversations": broken} if broken else counters
    return Trajectory(task, group, conversations, counters=counted, **fields)


def conversations_of(
    turns: Iterable[Turn], rewards: Mapping[Key, float] = _NO_REWARDS
) -> tuple[tuple[Conversation, ...], int]:
    """The conversations in the order of their keys, and how many turns should have extended one and did not.

    A prompt that begins with all ids of an open conversation extends it; any other opens a new one. Only sampled tokens
    of trained turns carry loss. Turns without ids, as a text-only service leaves them, make no conversation. The reward
    of a turn, by its key, becomes a span over what that turn sampled.
    """
    conversations: list[_Open] = []
    by_tail: dict[tuple[int, bytes], list[_Open]] = {}
    lengths: set[int] = set()
    broken = 0
    for turn in sorted(turns, key=lambda turn: key_order(turn.key)):
        completion = turn.reply.completion
        if not len(completion.token_ids):
            continue
        prompt = completion.prompt_ids
        found = next((one for one in _candidates(prompt, lengths, by_tail) if one.begins(prompt)), None)
        if found is None:
            found = _Open(turn.kind, _NO_IDS, _NO_MASK, _NO_LOGPROBS)
            conversations.append(found)
            broken += turn.is_continuation
        else:
            by_tail[found.tail].remove(found)
        found.extend(turn, rewards.get(turn.key))
        by_tail.setdefault(found.tail, []).append(found)
        lengths.add(len(found.token_ids))
    return tuple(one.closed() for one in conversations), broken


@dataclass
class _Open:
    kind: str
    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    truncated: bool = False
    spans: tuple[Span, ...] = ()

    @property
    def tail(self) -> tuple[int, bytes]:
        return len(self.token_ids), self.token_ids[-_TAIL:].tobytes()

    def begins(self, prompt: np.ndarray) -> bool:
        return np.array_equal(self.token_ids, prompt[: len(self.token_ids)])

    def extend(self, turn: Turn, reward: float | None) -> None:
        """Add what the prompt has beyond the conversation, without loss, and what was sampled."""
        completion = turn.reply.completion
        given, sampled = completion.prompt_ids[len(self.token_ids) :], completion.token_ids
        mask = np.full(len(sampled), turn.trained)
        logprobs = np.where(mask, completion.logprobs, np.float32(0))
        self.kind = turn.kind
        self.token_ids = np.concatenate([self.token_ids, given, sampled]).astype(np.int32)
        self.loss_mask = np.concatenate([self.loss_mask, np.zeros(len(given), bool), mask])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(len(given), np.float32), logprobs]).astype(np.float32)
        self.truncated = completion.finish_reason == "length"
        if reward is not None and turn.trained:
            end, step = len(self.token_ids), ":".join(map(str, turn.key))
            self.spans += (Span(end - len(sampled), end, step, reward),)

    def closed(self) -> Conversation:
        return Conversation(self.token_ids, self.loss_mask, self.logprobs, self.kind, self.truncated, self.spans)


def _candidates(
    prompt: np.ndarray, lengths: set[int], by_tail: dict[tuple[int, bytes], list[_Open]]
) -> Iterable[_Open]:
    for length in lengths:
        if length <= len(prompt):
            yield from by_tail.get((length, prompt[max(0, length - _TAIL) : length].tobytes()), ())


_NO_IDS, _NO_MASK, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
