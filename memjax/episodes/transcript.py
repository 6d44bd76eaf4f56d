"""What a metric may see of an episode, from the turns that were watched."""

from __future__ import annotations

from collections.abc import Iterable

from memjax.episodes.episode import Turn, key_order
from memjax.rewards.transcript import Transcript, TranscriptTurn
from memjax.trajectory import Task, Trajectory


def transcript_turn(turn: Turn) -> TranscriptTurn:
    """The texts of a turn, without its prompt and its arrays."""
    reply = turn.reply
    tokens = reply.completion.completion_tokens or len(reply.completion.token_ids)
    return TranscriptTurn(turn.key, turn.kind, reply.text, tokens, reply.truncated, {**turn.notes})


def transcript_of(task: Task, trajectory: Trajectory, answer: str, turns: Iterable[TranscriptTurn]) -> Transcript:
    """The transcript of a finished episode, whose reply holds this `answer`; turns may come in any order."""
    return Transcript(
        question=task.question,
        answers=task.answers,
        answer=answer,
        reply=trajectory.answer,
        turns=tuple(sorted(turns, key=lambda turn: key_order(turn.key))),
        counters={**trajectory.counters},
        extra={**task.extra},
    )
