"""Conversations laid into rows of fixed length, in the micro-batches of each optimiser step. numpy only.

M micro-batches, B rows of one micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from memjax.trajectory import Conversation, Trajectory


@dataclass(frozen=True)
class PackingConfig:
    """How a rollout batch is cut up.

    `row_tokens` is the length of a row, which bounds a conversation. `micro_batch_tokens` is how many tokens, padding
    included, all devices together hold in one forward and backward pass. `optimizer_steps` is the number of updates
    that one rollout batch gives, however many turns its documents had. `row_multiple` is the number of devices that
    rows are split over (data x fsdp).
    """

    row_tokens: int
    micro_batch_tokens: int
    optimizer_steps: int = 1
    row_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("row_tokens", "micro_batch_tokens", "optimizer_steps", "row_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rows < self.row_multiple:
            raise ValueError(
                f"micro_batch_tokens is {self.micro_batch_tokens}, less than one row of {self.row_tokens} tokens "
                f"for each of {self.row_multiple} devices: set it to at least {self.row_tokens * self.row_multiple}"
            )

    @property
    def rows(self) -> int:
        """Rows of a micro-batch: what the token budget allows, in whole multiples."""
        return self.micro_batch_tokens // self.row_tokens // self.row_multiple * self.row_multiple


class Rows(NamedTuple):
    """What the model reads, and where it is trained; with axes B T alone, one micro-batch of it.

    Segment 0 is padding; the conversations of a row are its segments 1, 2, ..., each with positions from 0. The mask of
    a sampled token stands at the token's own place. The arrays are numpy's until they are placed on devices.
    """

    tokens: Int[Any, "*M B T"]
    positions: Int[Any, "*M B T"]
    segment_ids: Int[Any, "*M B T"]
    loss_mask: Bool[Any, "*M B T"]


@dataclass(frozen=True)
class PackedStep:
    """The rows of one optimiser step, and whose tokens they hold.

    `trajectory` is the index in the rollout batch and `conversation` one that no other conversation of the step has;
    both are -1 on padding. `places` says where conversations with step rewards lie: their trajectory, themselves, and
    the place of their first token when the micro-batches are laid end to end.
    """

    rows: Rows
    rollout_logprobs: Float[np.ndarray, "M B T"]
    trajectory: Int[np.ndarray, "M B T"]
    conversation: Int[np.ndarray, "M B T"]
    conversations: int
    places: Sequence[tuple[int, Conversation, int]] = ()


def pack(
    trajectories: Sequence[Trajectory], config: PackingConfig, *, mask_truncated: bool = False
) -> list[PackedStep]:
    """Lay the conversations of a rollout batch into the rows of its `optimizer_steps` updates.

    Groups are split over the updates in order, each with all its trajectories and all their conversations.
    Conversations in which nothing is to be learned (no sampled token; cut at the token limit, with `mask_truncated`)
    make no row. Raises ValueError for a conversation that does not fit a row and for fewer groups than updates.
    """
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    if len(groups) < config.optimizer_steps:
        raise ValueError(
            f"{len(groups)} groups cannot be split over {config.optimizer_steps} optimiser steps: "
            "sample more groups or lower optimizer_steps"
        )
    borders = np.array_split(np.arange(len(groups)), config.optimizer_steps)
    members = list(groups.values())
    chosen = [
        [
            (index, conversation)
            for group in part
            for index in members[group]
            for conversation in trajectories[index].conversations
            if conversation.loss_mask.any() and not (mask_truncated and conversation.truncated)
        ]
        for part in borders
    ]
    for step in chosen:
        for index, conversation in step:
            _check(conversation, trajectories[index], config)
    placed = [first_fit([len(c.token_ids) for _, c in step], config.row_tokens) for step in chosen]
    needed = max(-(-len(set(rows)) // config.rows) for rows in placed)
    # Powers of two: a handful of compiled shapes for any number of conversations. The update passes over empty ones.
    micro_batches = 1 << (max(needed, 1) - 1).bit_length()
    return [_lay(step, rows, config, micro_batches) for step, rows in zip(chosen, placed, strict=True)]


def first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Row of each item when the longest are placed first, each into the first row with room for it."""
    left = np.full(len(lengths), capacity)
    rows = [0] * len(lengths)
    for item in np.argsort(-np.asarray(lengths), kind="stable"):
        row = int(np.argmax(left >= lengths[item]))
        left[row] -= lengths[item]
        rows[item] = row
    return rows


def _check(conversation: Conversation, trajectory: Trajectory, config: PackingConfig) -> None:
    name = f"a {conversation.kind} conversation of task {trajectory.task_id!r}"
    if len(conversation.token_ids) > config.row_tokens:
        raise ValueError(
            f"{name} has {len(conversation.token_ids)} tokens, more than a row of {config.row_tokens}: "
            "raise row_tokens or lower the agent's budgets"
        )
    if conversation.loss_mask[0]:
        raise ValueError(f"{name} starts with a sampled token, which has no prompt to be learned from")
    if not np.isfinite(conversation.logprobs).all():
        raise ValueError(f"{name} has log-probabilities that are no numbers")


def _lay(
    step: Sequence[tuple[int, Conversation]], rows: Sequence[int], config: PackingConfig, micro_batches: int
) -> PackedStep:
    """Write each conversation behind those already in its row."""
    shape = (micro_batches * config.rows, config.row_tokens)
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    mask, logprobs = np.zeros(shape, bool), np.zeros(shape, np.float32)
    trajectory, conversation_index = (np.full(shape, -1, np.int32) for _ in range(2))
    places = []
    end, segments = np.zeros(shape[0], int), np.zeros(shape[0], int)
    for i, ((index, conversation), row) in enumerate(zip(step, rows, strict=True)):
        length = len(conversation.token_ids)
        span = row, slice(end[row], end[row] + length)
        if conversation.spans:
            places.append((index, conversation, int(row * config.row_tokens + end[row])))
        end[row] += length
        segments[row] += 1
        tokens[span] = conversation.token_ids
        positions[span] = np.arange(length)
        segment_ids[span] = segments[row]
        mask[span] = conversation.loss_mask
        logprobs[span] = np.where(conversation.loss_mask, conversation.logprobs, 0.0)
        trajectory[span] = index
        conversation_index[span] = i
    assert segments.sum() == len(step), "every conversation that is trained has its place in a row"

    def cut(x: np.ndarray) -> np.ndarray:
        return x.reshape(micro_batches, config.rows, config.row_tokens)

    rows_MBT = Rows(*(cut(x) for x in (tokens, positions, segment_ids, mask)))
    return PackedStep(rows_MBT, cut(logprobs), cut(trajectory), cut(conversation_index), len(step), places)
