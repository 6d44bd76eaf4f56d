"""Metrics and rewards: one function, `score`, says what an answer is worth."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from memjax.own_code import is_own, load_own
from memjax.rewards import memagent, qa, ruler

Reads = Literal["answer", "reply", "trajectory"]
"""What a metric is given: the extracted answer or the whole reply, each beside the gold answers; or a `Transcript`."""

Function = TypeVar("Function", bound=Callable[..., float])


@dataclass(frozen=True)
class Metric:
    """A function that says what an answer is worth, and what it reads.

    It is called as f(prediction, answers) or, where it reads the trajectory, as f(transcript).
    """

    name: str
    function: Callable[..., Any]
    reads: Reads = "answer"


def metric(*, reads: Reads) -> Callable[[Function], Function]:
    """The decorator by which a function of one's own says that it reads the reply or the trajectory."""
    if reads not in get_args(Reads):
        raise ValueError(f"a metric reads {', '.join(get_args(Reads))}, got {reads!r}")

    def mark(function: Function) -> Function:
        function.reads = reads  # type: ignore[attr-defined]
        return function

    return mark


def _best(compare: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """The function that takes the gold answer which fits best."""
    return lambda prediction, answers: max(compare(prediction, answer) for answer in answers)


_BUILT_IN = (
    Metric("em", _best(qa.exact_match)),
    Metric("f1", _best(qa.f1)),
    Metric("hotpot_f1", _best(qa.hotpot_f1)),
    Metric("sub_em", _best(qa.sub_em)),
    Metric("number", _best(qa.number)),
    Metric("memagent_sub_em", _best(memagent.sub_em)),
    Metric("memagent_reward", memagent.verify, reads="reply"),
    Metric("ruler_all", ruler.string_match_all),
    Metric("ruler_part", ruler.string_match_part),
    Metric("longbench_f1", _best(qa.f1)),  # LongBench's qa_f1_score has no rule of its own
    Metric("recall", qa.recall_of_all),
)
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _BUILT_IN})


def score(metric: str, prediction: str, answers: Sequence[str]) -> float:
    """What `prediction` is worth, in [0, 1], by the built-in metric of that name and all gold answers.

    `prediction` is what the metric reads: the answer already extracted, or the raw reply. "" scores 0 by every metric
    but memagent_sub_em, which keeps upstream's faults. ValueError for a metric that does not exist and for gold answers
    that are not a list of strings.
    """
    found = METRICS.get(metric)
    if found is None:
        raise ValueError(unknown_metric(metric))
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list of strings, got the string {answers!r}; write [{answers!r}]")
    if not answers:
        raise ValueError("answers is empty; a metric needs at least one gold answer")
    return found.function(prediction, answers)


def own_metric(name: str) -> Metric:
    """The metric that a function of the user's is. ValueError, in a sentence, where it cannot be called as one."""
    function = load_own(name, "reward")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"the reward {name} is async: write def, not async def")
    if not callable(function):
        raise ValueError(f"the reward {name} must be a function, got {function!r:.80}")
    reads: Reads = getattr(function, "reads", "answer")
    if reads not in get_args(Reads):
        raise ValueError(f"the reward {name} reads {reads!r}: it must be one of {', '.join(get_args(Reads))}")
    given = ("transcript",) if reads == "trajectory" else ("prediction", "answers")
    signature = inspect.signature(function)
    try:
        signature.bind(*given)
    except TypeError as error:
        wanted = f"it reads the {reads}, so it is called with ({', '.join(given)})"
        raise ValueError(f"the reward {name} takes {signature}, but {wanted}: {error}") from None
    return Metric(name, function, reads)


def check_metric(name: str) -> None:
    """ValueError unless `name` is a metric or names a function of the user's own."""
    if name not in METRICS and not is_own(name):
        raise ValueError(f"{unknown_metric(name)}; a function of your own is named path/to/file.py:name or module:name")


def unknown_metric(name: str) -> str:
    """The message for a metric name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no metric {name!r}{hint} (metrics: {', '.join(METRICS)})"
