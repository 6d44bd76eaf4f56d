"""RULER's two metrics (NVIDIA/RULER, scripts/eval/synthetic/constants.py), for one sample and between 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence


def string_match_all(prediction: str, golds: Sequence[str]) -> float:
    """The share of the gold strings that the prediction contains, whatever their case."""
    prediction = prediction.lower()
    return sum(gold.lower() in prediction for gold in golds) / len(golds)


def string_match_part(prediction: str, golds: Sequence[str]) -> float:
    """1 where the prediction contains any of the gold strings, whatever their case; the metric of qa_1 and qa_2."""
    prediction = prediction.lower()
    return float(any(gold.lower() in prediction for gold in golds))
