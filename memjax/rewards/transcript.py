"""What a metric may see of a finished episode: texts and counters, no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TranscriptTurn:
    """One call of the model."""

    key: tuple[int | str, ...]  # names the call within its episode: the same place has the same key in every sample
    kind: str  # as the agent calls it: memory, final, ...
    reply: str
    tokens: int  # of the reply
    truncated: bool = False  # the reply was cut at its token limit
    notes: Mapping[str, Any] = field(default_factory=dict)  # what the agent noted beside the reply


@dataclass(frozen=True)
class Transcript:
    """A finished episode and its task."""

    question: str
    answers: tuple[str, ...]  # the gold answers
    answer: str  # extracted from the reply
    reply: str  # what the agent returned, whole
    turns: tuple[TranscriptTurn, ...] = ()  # in the order of their keys
    counters: Mapping[str, float] = field(default_factory=dict)  # document_tokens, model_calls, ...
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the data set knows of the task
