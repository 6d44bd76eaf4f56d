"""Readings of documents as files to learn from: a JSON object a line.

    {"task": "7", "sample": 0, "reward": 1.0, "answer": "...", "conversations": [
        {"kind": "memory", "prompt": [ids], "reply": [ids], "truncated": false}, ...]}

A prompt may also be chat messages, `[{"role": "user", "content": "..."}]`, and a reply a text: they get the ids of the
model that learns. Lines without conversations say what was tried and not kept, and are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np

from memjax.data.json_rows import read_rows
from memjax.rollout.client import Message
from memjax.tokenizer import Tokenizer
from memjax.train.attempts import Attempt
from memjax.trajectory import Conversation, ConversationKind, Trajectory
from memjax.whole_file import append_line, drop_torn_line


def read_trajectories(path: Path, tokenizer: Tokenizer) -> list[Trajectory]:
    """The trajectories of a file. ValueError, naming the line, for what is malformed; and for a file without one."""
    if not path.exists():
        raise ValueError(f"there is no trajectory file {path}: `memjax train demonstrations` makes one")
    found = []
    for place, row in read_rows(path):
        if "conversations" in row:
            try:
                found.append(_trajectory(row, tokenizer))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{place}: no trajectory that can be learned from: {error!r}") from error
    if not found:
        raise ValueError(f"{path} holds no trajectory: none was good enough, or it is a file of another kind")
    return found


def row_of(attempt: Attempt, sample: int, *, keep: bool) -> dict[str, Any]:
    """The line of an attempt, with its conversations if it is to be learned from."""
    trajectory = attempt.trajectory
    row: dict[str, Any] = {
        "task": attempt.task.id,
        "sample": sample,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "error": trajectory.error or attempt.reward_error,
    }
    if keep:
        row["conversations"] = [
            {
                "kind": c.kind,
                "prompt": c.token_ids[~c.loss_mask].tolist(),
                "reply": c.token_ids[c.loss_mask].tolist(),
                "truncated": c.truncated,
            }
            for c in trajectory.conversations
        ]
    return row


class TrajectoryFile:
    """A file that grows by whole lines and knows what it holds. Close it, or use it in `with`.

    Its first line is `made_with`; ValueError where the file was made with something else. A line that a killed process
    left unfinished is cut off.
    """

    def __init__(self, path: Path, made_with: Mapping[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        drop_torn_line(path)
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        if rows and rows[0].get("made_with") != made_with:
            raise ValueError(
                f"{path} was made with {rows[0].get('made_with')}, not {dict(made_with)}: name another file"
            )
        self._rows = {(row["task"], row["sample"]): row for row in rows[1:]}
        self._file: IO[bytes] = path.open("ab")
        if not rows:
            append_line(self._file, {"made_with": dict(made_with)})

    def holds(self, task: str, sample: int) -> bool:
        """Whether this attempt was made and came to its end."""
        row = self._rows.get((task, sample))
        return row is not None and row["error"] is None

    @property
    def made(self) -> int:
        """Attempts, good or not."""
        return len(self._rows)

    @property
    def kept(self) -> int:
        """Attempts to learn from."""
        return sum("conversations" in row for row in self._rows.values())

    @property
    def failed(self) -> int:
        """Attempts that did not come to their end; they are made again when the file is opened again."""
        return sum(row["error"] is not None for row in self._rows.values())

    def add(self, row: dict[str, Any]) -> None:
        """Write a line of `row_of`."""
        self._rows[row["task"], row["sample"]] = {k: bool(v) if k == "conversations" else v for k, v in row.items()}
        append_line(self._file, row)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def __enter__(self) -> TrajectoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _trajectory(row: Mapping[str, Any], tokenizer: Tokenizer) -> Trajectory:
    task = str(row["task"])
    conversations = tuple(_conversation(one, tokenizer) for one in row["conversations"])
    return Trajectory(task, task, conversations, row.get("answer", ""), row.get("reward"))


def _conversation(row: Mapping[str, Any], tokenizer: Tokenizer) -> Conversation:
    kind: ConversationKind = row.get("kind", "turn")
    if kind not in get_args(ConversationKind):
        raise ValueError(f"kind is {kind!r}; there are {', '.join(get_args(ConversationKind))}")
    prompt, reply = row["prompt"], row["reply"]
    if prompt and isinstance(prompt[0], Mapping):
        prompt = tokenizer.render([Message(message["role"], (message["content"],)) for message in prompt])
    if isinstance(reply, str):
        reply = [*tokenizer.encode(reply), tokenizer.eos_ids[0]]
    ids = np.asarray([*prompt, *reply], np.int32)
    if not prompt or not reply or ids.min() < 0 or ids.max() >= tokenizer.size:
        raise ValueError(f"a prompt and a reply are ids in 0..{tokenizer.size - 1}, or text")
    mask = np.arange(len(ids)) >= len(prompt)
    return Conversation(ids, mask, np.zeros(len(ids), np.float32), kind, bool(row.get("truncated", False)))
