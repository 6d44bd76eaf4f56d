"""Where a memory agent lost what an answer needed: never written down, dropped later, or held and not used.

The words of a fact are looked for in each memory, so a memory that paraphrases a fact counts as not holding it: the
rates are lower bounds, comparable between runs on the same tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memjax.eval.recording import Turn
from memjax.rewards import score
from memjax.trajectory import Task

Stage = Literal["unseen", "capture", "retention", "use", "kept"]
STAGES: tuple[Stage, ...] = ("unseen", "capture", "retention", "use", "kept")

# Metrics that want every answer; for all others the answers are spellings of one.
_ALL_ANSWERS = frozenset({"ruler_all", "recall"})
_NAME_CHARS = 60  # of a passage without a title
_WITHOUT_WORDS = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True)
class Evidence:
    """One fact that the answer needs.

    `texts` is how it stands in the document; `words` is what tells that a memory holds it. Any one is enough of either.
    """

    name: str
    texts: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Fate:
    """What became of one fact. Chunks count from 0.

    `lost_at` is the chunk at whose reading it was lost: where it was shown and not captured, or the update that
    dropped it for the last time. `updates` counts the memory updates made while it was held, `drops` those that
    dropped it.
    """

    name: str
    stage: Stage
    shown_in: tuple[int, ...]
    captured_at: int | None
    lost_at: int | None
    updates: int
    drops: int

    def to_json(self) -> dict[str, Any]:
        """Plain values for the samples file."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Fate:
        """The fate that a samples file holds."""
        return cls(**{**row, "shown_in": tuple(row["shown_in"])})


def evidence_of(task: Task) -> tuple[Evidence, ...]:
    """The facts a task is known to need: those its data set names in `extra["evidence"]`, else its answers.

    A fact without words to know it by is left out: its title stands in the question, or the answer is yes or no.
    """
    named = [_named(item, text, task) for item, text in passages(task)]
    if watched := tuple(fact for fact in named if fact.words):
        return watched
    answers = tuple(answer for answer in task.answers if answer.casefold() not in _WITHOUT_WORDS)
    if task.metric in _ALL_ANSWERS:
        return tuple(Evidence(answer, (answer,), (answer,)) for answer in dict.fromkeys(answers))
    return (Evidence("answer", answers, answers),) if answers else ()


def passages(task: Task) -> list[tuple[Mapping[str, Any], str]]:
    """Each item of `extra["evidence"]` that says where it stands, with its text.

    An item has its "text", or the characters from "start" to "end" of the context that it takes.
    """
    given = task.extra.get("evidence", ())
    items = [
        item for item in given if isinstance(item, Mapping) and ("text" in item or {"start", "end"} <= item.keys())
    ]
    texts = [item.get("text", "") for item in items]
    at = 0
    for piece in [task.context] if isinstance(task.context, str) else task.context.pieces():
        for index, item in enumerate(items):
            if "text" not in item and item["start"] < at + len(piece) and item["end"] > at:
                texts[index] += piece[max(0, item["start"] - at) : item["end"] - at]
        at += len(piece)
        if all("text" in item or item["end"] <= at for item in items):
            break
    return list(zip(items, texts, strict=True))


def diagnose(evidence: Sequence[Evidence], turns: Sequence[Turn], correct: bool) -> tuple[Fate, ...]:
    """The fate of each fact over the memory turns of a sample; `turns` excludes the final one."""
    fates = []
    memories = _memories(turns)
    for index, fact in enumerate(evidence):
        shown = tuple(k for k, turn in enumerate(turns) if turn.shown[index])
        held = [score("sub_em", memory, fact.words) > 0 for memory in memories]
        fates.append(_fate(fact.name, shown, held, correct))
    return tuple(fates)


def counters(fates: Iterable[Fate]) -> dict[str, float]:
    """Rates over facts, under the names the learner logs; each is given that the stage before it went well."""
    fates = list(fates)
    stages = Counter(fate.stage for fate in fates)
    captured = stages["retention"] + stages["use"] + stages["kept"]
    retained = stages["use"] + stages["kept"]
    updates = sum(fate.updates for fate in fates)
    rates = {
        "memory/evidence_seen": (len(fates) - stages["unseen"], len(fates)),
        "memory/capture_rate": (captured, captured + stages["capture"]),
        "memory/retention_rate": (retained, captured),
        "memory/retention_rate_per_update": (updates - sum(fate.drops for fate in fates), updates),
        "memory/use_rate": (stages["kept"], retained),
    }
    return {name: part / whole for name, (part, whole) in rates.items() if whole}


def losses_by_tenth(samples: Iterable[tuple[Sequence[Fate], int]]) -> dict[Stage, list[int]]:
    """How many facts were lost in each tenth of their document; each sample comes with its number of chunks."""
    tenths: dict[Stage, list[int]] = {"capture": [0] * 10, "retention": [0] * 10}
    for fates, chunks in samples:
        for fate in fates:
            if fate.stage in tenths and fate.lost_at is not None:
                tenths[fate.stage][min(9, 10 * fate.lost_at // max(1, chunks))] += 1
    return tenths


def _named(item: Mapping[str, Any], text: str, task: Task) -> Evidence:
    """A passage is known by its title, unless the question gives that away, and by the answers that stand in it."""
    title = str(item.get("title", ""))
    spoken = title.partition(" (")[0]  # Wikipedia's "Big Stone Gap (film)" is called Big Stone Gap
    words = [spoken] if spoken and not score("sub_em", task.question, (spoken,)) else []
    words += [answer for answer in task.answers if score("sub_em", text, (answer,))]
    return Evidence(
        title or " ".join(text[:_NAME_CHARS].split()),
        (text,),
        tuple(word for word in dict.fromkeys(words) if word.casefold() not in _WITHOUT_WORDS),
    )


def _memories(turns: Sequence[Turn]) -> list[str]:
    """The memory after each chunk: an empty update keeps the one before."""
    memories: list[str] = []
    for turn in turns:
        memories.append(turn.text if turn.text.strip() or not memories else memories[-1])
    return memories


def _fate(name: str, shown: tuple[int, ...], held: Sequence[bool], correct: bool) -> Fate:
    captured_at = next((k for k, holds in enumerate(held) if holds), None)
    drops = [k for k in range(1, len(held)) if held[k - 1] and not held[k]]
    updates = sum(held[:-1])
    stage: Stage
    lost_at: int | None = None
    if held and held[-1]:
        stage = "kept" if correct else "use"
    elif captured_at is not None:
        stage, lost_at = "retention", drops[-1]
    elif shown:
        stage, lost_at = "capture", shown[-1]
    else:
        stage = "unseen"
    return Fate(name, stage, shown, captured_at, lost_at, updates, len(drops))
