"""Where a memory agent lost what an answer needed: never written down, dropped later, or held and not used.

The words of a fact are looked for in each memory, so a memory that paraphrases a fact counts as not holding it: the
rates are lower bounds, comparable between runs on the same tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memjax.data.chunks import ChunkTokenizer
from memjax.data.evidence import passages
from memjax.episodes.episode import Turn
from memjax.rewards import score
from memjax.trajectory import Task

Stage = Literal["unseen", "capture", "retention", "use", "kept"]
STAGES: tuple[Stage, ...] = ("unseen", "capture", "retention", "use", "kept")

# Metrics that want every answer; for all others the answers are spellings of one.
_ALL_ANSWERS = frozenset({"ruler_all", "recall"})
_NAME_CHARS = 60  # of a passage without a title
# A chunk border may cut a watched text in two; this much of its start or end is enough to know it by.
_MARK = 60
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


class Diagnosis:
    """Takes the memory turns of an episode one by one, and says what became of each fact. It holds no document text."""

    def __init__(self, evidence: Sequence[Evidence], tokenizer: ChunkTokenizer):
        self._evidence, self._decode = evidence, tokenizer.decode
        self._marks = [[mark for text in fact.texts for mark in _marks(text)] for fact in evidence]
        self._shown: list[list[int]] = [[] for _ in evidence]  # by fact: the turns that showed it
        self._held: list[list[bool]] = [[] for _ in evidence]  # by fact: whether each memory holds it
        self.memories: list[str] = []  # after each turn

    def add(self, turn: Turn) -> None:
        """Take a turn; one that read no chunk, or wrote no memory, is passed over."""
        if turn.chunk is None or turn.kind != "memory":
            return
        text, said = _squeezed(self._decode(turn.chunk.ids)) if self._evidence else "", turn.reply.text
        memory = said if said.strip() or not self.memories else self.memories[-1]  # an empty update keeps the memory
        for fact, marks, shown, held in zip(self._evidence, self._marks, self._shown, self._held, strict=True):
            if any(mark in text for mark in marks):
                shown.append(len(self.memories))
            held.append(score("sub_em", memory, fact.words) > 0)
        self.memories.append(memory)

    def fates(self, *, correct: bool) -> tuple[Fate, ...]:
        """The fate of each fact; none where no memory was written."""
        if not self.memories:
            return ()
        found = zip(self._evidence, self._shown, self._held, strict=True)
        return tuple(_fate(fact.name, tuple(shown), held, correct) for fact, shown, held in found)


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


def _squeezed(text: str) -> str:
    """Lower case, single spaces: what survives another line break or a decoding round trip."""
    return " ".join(text.casefold().split())


def _marks(text: str) -> tuple[str, ...]:
    squeezed = _squeezed(text)
    return (squeezed[:_MARK], squeezed[-_MARK:]) if len(squeezed) > _MARK else (squeezed,)


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
