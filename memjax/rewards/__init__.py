"""Metrics and rewards: one function, `score`, says what an answer is worth."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from memjax.rewards import memagent, qa, ruler

Metric = Callable[[str, Sequence[str]], float]


def _best(compare: Callable[[str, str], float]) -> Metric:
    """The metric that takes the gold answer which fits best."""
    return lambda prediction, answers: max(compare(prediction, answer) for answer in answers)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "em": _best(qa.exact_match),
        "f1": _best(qa.f1),
        "hotpot_f1": _best(qa.hotpot_f1),
        "sub_em": _best(qa.sub_em),
        "number": _best(qa.number),
        "memagent_sub_em": _best(memagent.sub_em),
        "memagent_reward": memagent.verify,
        "ruler_all": ruler.string_match_all,
        "ruler_part": ruler.string_match_part,
        "longbench_f1": _best(qa.f1),  # LongBench's qa_f1_score has no rule of its own
        "recall": qa.recall_of_all,
    }
)


def score(metric: str, prediction: str, answers: Sequence[str]) -> float:
    """What `prediction` is worth, in [0, 1], by the metric of that name and all gold answers.

    `prediction` is the answer already extracted, except for memagent_reward, which reads the raw response. "" scores 0
    by every metric but memagent_sub_em, which keeps upstream's faults. ValueError for a metric that does not exist and
    for gold answers that are not a list of strings.
    """
    function = METRICS.get(metric)
    if function is None:
        raise ValueError(unknown_metric(metric))
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list of strings, got the string {answers!r}; write [{answers!r}]")
    if not answers:
        raise ValueError("answers is empty; a metric needs at least one gold answer")
    return function(prediction, answers)


def unknown_metric(name: str) -> str:
    """The message for a metric name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no metric {name!r}{hint} (metrics: {', '.join(METRICS)})"
