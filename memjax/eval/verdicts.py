"""What a judging model said about the answers of a run: judged.jsonl beside the samples, one line per answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memjax.eval.statistics import Interval, interval

if TYPE_CHECKING:
    from memjax.eval.results import Key, Row

FILE = "judged.jsonl"

Ruling = Literal["right", "wrong", "unclear", "failed"]
"""`unclear`: the judge replied without a verdict. `failed`: it could not be asked, which is tried again."""


@dataclass(frozen=True)
class Verdict:
    """A judge's ruling on one answer. Any but `right` scores 0."""

    cell: str
    number: int
    answer: str  # that was judged: a sample that is read again is judged again
    judge: str  # the model
    prompt_hash: str  # of the judge's instructions
    ruling: Ruling
    reply: str
    error: str | None = None

    @property
    def key(self) -> Key:
        """The sample's."""
        return self.cell, self.number


@dataclass(frozen=True)
class Judged:
    """What the verdicts say about some samples. All of them count: those without a verdict as wrong."""

    score: Interval
    rulings: Mapping[str, int]  # of Ruling, and "no answer" (not asked about) and "missing" (not judged yet)
    agreement: float  # share of samples on which judge and metric say the same, a metric of at least 0.5 being right


def read_verdicts(directory: Path) -> dict[Key, Verdict]:
    """The last verdict on each sample; none where the run was not judged."""
    file = directory / FILE
    return {verdict.key: verdict for verdict in _lines(file)} if file.is_file() else {}


def ruling(row: Row, verdicts: Mapping[Key, Verdict]) -> str:
    """What became of a sample: a ruling, "no answer" or "missing"."""
    if row.error is not None or not row.extracted.strip():
        return "no answer"
    verdict = verdicts.get(row.key)
    return verdict.ruling if verdict and verdict.answer == row.extracted else "missing"


def judged(rows: Iterable[Row], verdicts: Mapping[Key, Verdict]) -> Judged:
    """The score that the judge gives some samples."""
    rows = list(rows)
    rulings = [ruling(row, verdicts) for row in rows]
    right = [said == "right" for said in rulings]
    agreeing = sum(says == (row.score >= 0.5) for says, row in zip(right, rows, strict=True))
    return Judged(interval([float(says) for says in right]), Counter(rulings), agreeing / len(rows))


def judge_of(verdicts: Mapping[Key, Verdict]) -> dict[str, Any]:
    """Who judged, with which prompt: one judge for all of a directory."""
    verdict = next(iter(verdicts.values()))
    return {"model": verdict.judge, "prompt_hash": verdict.prompt_hash}


def _lines(file: Path) -> Iterator[Verdict]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # what a kill left of a line
            try:
                yield Verdict(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}:{number} is not a verdict ({error}); remove the line") from error
