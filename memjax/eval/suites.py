"""The suites as data: what each asks, at which lengths, and what others have published on it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from memjax.data.ruler import ANSWER_TOKENS


@dataclass(frozen=True)
class Published:
    """One model's published scores in percent, by the label of the length."""

    model: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Suite:
    """What an evaluation asks.

    `data` are the names of the files that `--data NAME=PATH` must give, and
    those in `optional_data` it may.
    """

    name: str
    about: str
    tasks: tuple[str, ...]
    lengths: tuple[str, ...] = ()  # none: every task has the length it has
    samples: int | None = 128  # per task and length; None: all there are
    data: tuple[str, ...] = ()
    optional_data: tuple[str, ...] = ()
    agent: Mapping[str, int] = field(default_factory=dict)  # budgets of its own, under what a config says
    published: tuple[Published, ...] = ()
    source: str = ""  # of the published scores


def _rows(labels: Sequence[str], table: Mapping[str, Sequence[float]]) -> tuple[Published, ...]:
    """Published rows; a shorter row was not run at the longest lengths."""
    return tuple(Published(model, dict(zip(labels, scores, strict=False))) for model, scores in table.items())


_HOTPOT_LENGTHS = ("7k", "14k", "28k", "56k", "112k", "224k", "448k", "896k", "1.75m", "3.5m")
_RULER_LENGTHS = ("8k", "16k", "32k", "64k", "128k", "256k", "512k")

_RULER_HOTPOTQA = Suite(
    name="ruler-hotpotqa",
    about="HotpotQA questions, their paragraphs scattered among distractors up to the length (MemAgent's main table)",
    tasks=("ruler-hotpotqa",),
    lengths=_HOTPOT_LENGTHS,
    data=("hotpotqa",),
    published=_rows(
        _HOTPOT_LENGTHS,
        {
            "RL-MemAgent-14B": (83.59, 82.03, 84.38, 80.47, 76.56, 81.25, 75.00, 77.34, 76.56, 78.12),
            "RL-MemAgent-7B": (82.03, 79.69, 78.91, 77.34, 79.69, 72.66, 74.22, 76.56, 75.78, 71.09),
            "QwenLong-L1-32B": (72.66, 75.00, 72.66, 60.94, 31.25, 17.19, 13.28, 11.72),
            "Qwen2.5-14B-Instruct-1M": (60.16, 60.94, 50.00, 57.03, 50.00, 37.50, 8.59, 0.00),
            "Qwen2.5-7B-Instruct-1M": (61.72, 56.25, 53.91, 55.47, 51.56, 33.59, 12.50, 0.00),
        },
    ),
    source="MemAgent (arXiv 2507.02259v1), table 2: memagent_sub_em of 128 samples at temperature 0.7, top-p 0.95",
)

_RULER = Suite(
    name="ruler",
    about="RULER's 13 tasks: needles, variables, frequent words, questions",
    tasks=tuple(ANSWER_TOKENS),
    lengths=_RULER_LENGTHS,
    optional_data=("squad", "hotpotqa", "essay"),
    published=_rows(
        _RULER_LENGTHS,
        {
            "RL-MemAgent-14B": (97.45, 96.97, 97.46, 97.85, 96.08, 96.24, 95.40),
            "RL-MemAgent-7B": (93.03, 92.03, 91.33, 88.83, 86.92, 83.70, 81.91),
            "QwenLong-L1-32B": (92.00, 91.23, 91.40, 77.39, 41.66, 23.22, 14.78),
            "Qwen2.5-14B-Instruct-1M": (98.34, 97.31, 93.47, 90.50, 89.95, 83.91, 62.34),
            "Qwen2.5-7B-Instruct-1M": (90.28, 89.57, 88.56, 87.37, 85.11, 78.14, 39.21),
        },
    ),
    source="MemAgent (arXiv 2507.02259v1), figure 6a: mean of ten tasks (eight niah, vt, fwe), 128 samples each",
)

_HOTPOTQA = Suite(
    name="hotpotqa",
    about="HotpotQA's distractor setting: each question with its own ten paragraphs",
    tasks=("hotpotqa",),
    data=("hotpotqa",),
)

_LONGBENCH_QA = Suite(
    name="longbench-qa",
    about="LongBench's six English question answering sets, from the JSONL files that its authors publish",
    tasks=("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
    samples=None,
    data=("longbench",),
)

_FILE = Suite(
    name="file",
    about="any task file that `memjax data` writes or reads, MemAgent's and RULER's included",
    tasks=("file",),
    samples=None,
    data=("tasks",),
)

_SMOKE = Suite(
    name="smoke",
    about="eight needles and variables in 1k tokens, read in two chunks: does everything work, in a minute",
    tasks=("niah_single_1", "vt"),
    lengths=("1k",),
    samples=4,
    agent=MappingProxyType({"question": 128, "chunk": 512, "memory": 96, "answer": 64}),
)

SUITES: Mapping[str, Suite] = MappingProxyType(
    {suite.name: suite for suite in (_RULER_HOTPOTQA, _RULER, _HOTPOTQA, _LONGBENCH_QA, _FILE, _SMOKE)}
)


def suite_named(name: str) -> Suite:
    """The suite, or a ValueError that names the nearest."""
    if name in SUITES:
        return SUITES[name]
    near = difflib.get_close_matches(name, SUITES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no suite {name!r}{hint} (suites: {', '.join(SUITES)})")
