"""Metrics for short answers: exact match, F1, containment and recall, each in [0, 1]."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# Chinese characters and Japanese kana are words of one character: those scripts put no space between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


class Overlap(NamedTuple):
    """How far the tokens of prediction and gold agree."""

    f1: float
    precision: float
    recall: float


def squad_form(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalize(text: str) -> str:
    """`squad_form`, except that a text of which nothing would be left ("The", "?") stays: it can then be answered."""
    return squad_form(text) or " ".join(text.lower().split())


def exact_match(prediction: str, gold: str) -> float:
    """1 where both have one normal form (SQuAD)."""
    return float(normalize(prediction) == normalize(gold))


def overlap(prediction: str, gold: str) -> Overlap:
    """Token precision, recall and F1 of the normal forms (SQuAD; LongBench's qa_f1_score is the same)."""
    predicted, wanted = normalize(prediction).split(), normalize(gold).split()
    same = (Counter(predicted) & Counter(wanted)).total()
    if same == 0:
        return Overlap(0.0, 0.0, 0.0)
    precision, recall = same / len(predicted), same / len(wanted)
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def hotpot_overlap(prediction: str, gold: str) -> Overlap:
    """`overlap` under HotpotQA's rule: where one side is yes, no or noanswer, only equality counts."""
    predicted, wanted = normalize(prediction), normalize(gold)
    if predicted != wanted and not {predicted, wanted}.isdisjoint({"yes", "no", "noanswer"}):
        return Overlap(0.0, 0.0, 0.0)
    return overlap(prediction, gold)


def f1(prediction: str, gold: str) -> float:
    """Token F1 (SQuAD)."""
    return overlap(prediction, gold).f1


def hotpot_f1(prediction: str, gold: str) -> float:
    """Token F1 with HotpotQA's rule for yes and no."""
    return hotpot_overlap(prediction, gold).f1


def sub_em(prediction: str, gold: str) -> float:
    """1 where the gold answer's words stand in the prediction, whole and in order.

    One way only and on word boundaries: "1" is not in "1984", "no" not in "Norway", and no prediction is right for
    being short.
    """
    words = _words(gold)
    if not words:
        return exact_match(prediction, gold)
    return float(f" {' '.join(words)} " in f" {' '.join(_words(prediction))} ")


def number(prediction: str, gold: str) -> float:
    """1 where the last number of the prediction is that of the gold answer: "$1,234.00 in all" is 1234.

    For GSM8K and its like. A gold answer without a number is compared as `exact_match` does.
    """
    wanted, found = _NUMBER.findall(gold), _NUMBER.findall(prediction)
    if not wanted:
        return exact_match(prediction, gold)
    return float(bool(found) and _value(found[-1]) == _value(wanted[-1]))


def _value(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


def recall_of_all(prediction: str, golds: Sequence[str]) -> float:
    """The share of the distinct gold answers that `sub_em` finds in the prediction.

    Equation 7 of the MemAgent paper (arXiv 2507.02259), for questions that want all of their answers.
    """
    distinct = {normalize(gold): gold for gold in golds}
    return sum(sub_em(prediction, gold) for gold in distinct.values()) / len(distinct)


def _words(text: str) -> list[str]:
    return _WORD.findall(normalize(unicodedata.normalize("NFKC", text)))
