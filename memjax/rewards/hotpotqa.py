"""HotpotQA's official evaluation: answers, supporting facts, and both together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memjax.rewards.qa import exact_match, hotpot_overlap


class Scores(NamedTuple):
    """Four metrics of one example, in the official order."""

    em: float
    f1: float
    prec: float
    recall: float


_MISSING = Scores(0.0, 0.0, 0.0, 0.0)


def official_metrics(
    answers: Mapping[str, str],
    supporting_facts: Mapping[str, Iterable[Sequence[Any]]],
    examples: Collection[Mapping[str, Any]],
) -> dict[str, float]:
    """The twelve numbers of hotpot_evaluate_v1.py (hotpotqa/hotpot): {,sp_,joint_} x {em,f1,prec,recall}.

    `answers` and `supporting_facts` ([title, sentence number] pairs) are keyed by example id, as in the official
    prediction file; `examples` are rows of the official data. What is missing scores 0, in its part and jointly.
    """
    if not examples:
        raise ValueError("there are no examples to evaluate")
    totals = [0.0] * 12
    for example in examples:
        key = example["_id"]
        answer = answer_scores(answers[key], example["answer"]) if key in answers else _MISSING
        facts = _MISSING
        if key in supporting_facts:
            facts = fact_scores(supporting_facts[key], example["supporting_facts"])
        values = [*answer, *facts, *_joint(answer, facts)]
        totals = [total + value for total, value in zip(totals, values, strict=True)]
    names = [prefix + name for prefix in ("", "sp_", "joint_") for name in Scores._fields]
    return {name: total / len(examples) for name, total in zip(names, totals, strict=True)}


def answer_scores(prediction: str, gold: str) -> Scores:
    """Scores of an answer, with the rule for yes and no."""
    same = hotpot_overlap(prediction, gold)
    return Scores(exact_match(prediction, gold), same.f1, same.precision, same.recall)


def fact_scores(predicted: Iterable[Sequence[Any]], gold: Iterable[Sequence[Any]]) -> Scores:
    """Scores of a set of supporting facts, each a [title, sentence number] pair."""
    chosen, wanted = {tuple(fact) for fact in predicted}, {tuple(fact) for fact in gold}
    right = len(chosen & wanted)
    precision = right / len(chosen) if chosen else 0.0
    recall = right / len(wanted) if wanted else 0.0
    return Scores(float(chosen == wanted), _harmonic_mean(precision, recall), precision, recall)


def _joint(answer: Scores, facts: Scores) -> Scores:
    precision, recall = answer.prec * facts.prec, answer.recall * facts.recall
    return Scores(answer.em * facts.em, _harmonic_mean(precision, recall), precision, recall)


def _harmonic_mean(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b > 0 else 0.0
