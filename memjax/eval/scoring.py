"""How answers are drawn, found in the reply, and scored: the presets `greedy` and `memagent`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memjax.rewards import METRICS, answers, memagent
from memjax.rewards.pool import Item, ScoringPool
from memjax.rewards.transcript import Transcript

_TRIES = 2


@dataclass(frozen=True)
class Extraction:
    """The answer found in a reply, and how it was found."""

    answer: str
    how: str


@dataclass(frozen=True)
class Preset:
    """One way to evaluate. `metrics` replaces a task's metric by another one."""

    name: str
    temperature: float
    top_p: float
    extract: Callable[[str], Extraction]
    metrics: Mapping[str, str]


def extract_strictly(response: str) -> Extraction:
    """The last box, else the answer tag, else what follows "answer is", else the whole reply."""
    text = answers.without_thinking(response)
    for how, extract in (
        ("box", answers.extract_boxed),
        ("tag", answers.extract_tag),
        ("answer is", answers.extract_answer_is),
    ):
        answer = extract(text)
        if answer is not None:
            return Extraction(answer, how)
    return Extraction(text.strip(), "whole reply")


def extract_like_memagent(response: str) -> Extraction:
    """MemAgent's box or its "the answer is" sentence, whichever its prompts asked for; a reply with neither is wrong.

    An `\\fbox`, at which their script stops with all results lost, counts as a reply without an answer.
    """
    try:
        boxed = memagent.extract_boxed(response)
    except ValueError:
        boxed = None
    if boxed is not None:
        return Extraction(boxed, "memagent box")
    said = memagent.extract_answer(response)
    return Extraction(said or "", "memagent sentence" if said else "none")


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "greedy": Preset("greedy", 0.0, 1.0, extract_strictly, MappingProxyType({})),
        "memagent": Preset(
            "memagent", 0.7, 0.95, extract_like_memagent, MappingProxyType({"sub_em": "memagent_sub_em"})
        ),
    }
)


@dataclass(frozen=True)
class Scores:
    """What one answer is worth by every metric, and which metrics gave no number (they count as 0)."""

    values: Mapping[str, float]
    errors: tuple[str, ...] = ()


async def score_answer(pool: ScoringPool, seen: Transcript, metric: str | None = None) -> Scores:
    """All metrics of one answer, and `metric` where it is a function of the user's own.

    Nothing extracted is 0 by all of ours, upstream's symmetric one included; no reply is 0 by a function of the user's.
    """
    items = [Item.of(name, seen) for name in dict.fromkeys([*METRICS, *([metric] if metric else [])])]
    asked = [item for item in items if (item.prediction if item.metric in METRICS else seen.reply).strip()]
    scores = await asyncio.gather(*(pool.score_async(item, _TRIES) for item in asked))
    values = {item.metric: 0.0 for item in items}
    values |= {item.metric: score.value for item, score in zip(asked, scores, strict=True)}
    return Scores(values, tuple(score.error for score in scores if score.error))
