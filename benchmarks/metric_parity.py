"""Compare our metrics, row by row, with what their reference implementations gave for published predictions.

    python benchmarks/metric_parity.py --data /path/to/data

The folder holds qa_metric_parity, hotpot_eval_parity, hotpotqa_dev_distractor_subset and ruler_qa_parity; parts of them
and their origin are in tests/rewards/data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memjax.rewards import hotpotqa, score

ROUNDED_TO_4_PLACES = {"ruler_all": 5e-5}


def rows(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def our_columns(row: Mapping[str, Any]) -> dict[str, float]:
    """Our value for each column of qa_metric_parity: what a reference gave for one prediction."""
    prediction, golds = row["pred"], row["golds"]
    answer = hotpotqa.answer_scores(prediction, golds[0])
    return {
        "hotpot_em": answer.em,
        "hotpot_f1": score("hotpot_f1", prediction, golds[:1]),
        "hotpot_prec": answer.prec,
        "hotpot_recall": answer.recall,
        "memagent_f1": answer.f1,
        "memagent_sub_em": score("memagent_sub_em", prediction, golds[:1]),
        "memagent_reward": score("memagent_reward", f"Therefore, the answer is \\boxed{{{prediction}}}.", golds),
        "longbench_f1": score("longbench_f1", prediction, golds),
        "ruler_part": score("ruler_part", prediction, golds),
        "ruler_all": score("ruler_all", prediction, golds),
    }


def differing_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns in which our value is not the reference's."""
    ours = our_columns(row)
    return [name for name in ours if abs(ours[name] - row[name]) > ROUNDED_TO_4_PLACES.get(name, 1e-12)]


def reference_columns(data: Path) -> Iterator[tuple[str, int, int]]:
    table = rows(data / "qa_metric_parity" / "qa_metric_parity.jsonl.gz")
    wrong = Counter(name for row in table for name in differing_columns(row))
    for name in our_columns(table[0]):
        yield f"qa_metric_parity {name}", len(table) - wrong[name], len(table)


def official_hotpot(data: Path) -> Iterator[tuple[str, int, int]]:
    folder = data / "hotpot_eval_parity"
    with gzip.open(folder / "pred_qwen3-8b_official_format.json.gz", "rt", encoding="utf-8") as file:
        predicted = json.load(file)
    gold_file = data / "hotpotqa_dev_distractor_subset" / "hotpot_dev_distractor_subset.json.gz"
    with gzip.open(gold_file, "rt", encoding="utf-8") as file:
        examples = json.load(file)
    expected = json.loads((folder / "expected_official_metrics.json").read_text())["metrics"]
    ours = hotpotqa.official_metrics(predicted["answer"], predicted["sp"], examples)
    equal = sum(abs(ours[name] - value) < 1e-12 for name, value in expected.items())
    yield "hotpot_evaluate_v1.py numbers", equal, len(expected)


def two_f1_definitions(data: Path) -> Iterator[tuple[str, int, int]]:
    plain = em = total = differing = 0
    for name in ("agentragdrop_none", "vanilla_rag"):
        for row in rows(data / "hotpot_eval_parity" / f"dev_4000_5000_{name}_results.jsonl.gz"):
            pair = row["pred_answer"], [row["gold_answer"]]
            plain += abs(score("f1", *pair) - row["f1"]) < 1e-12
            em += score("em", *pair) == row["em"]
            differing += score("f1", *pair) != score("hotpot_f1", *pair)
            total += 1
    yield "published per-example f1 (plain)", plain, total
    yield "published per-example em", em, total
    yield "rows on which f1 and hotpot_f1 differ", differing, 53


def ruler_scores(data: Path) -> Iterator[tuple[str, int, int]]:
    samples = rows(data / "ruler_qa_parity" / "ruler_qa_predictions.jsonl.gz")
    expected = json.loads((data / "ruler_qa_parity" / "expected.json").read_text())
    equal = 0
    for entry in expected:
        run = f"{entry['model']}@{entry['max_seq_length']}"
        values = [
            score("ruler_part", row["pred"][run], row["outputs"]) for row in samples if row["task"] == entry["task"]
        ]
        equal += round(100 * sum(values) / len(values), 2) == entry["published_score"]
    yield "published RULER qa scores", equal, len(expected)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our metrics with their reference implementations.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the published predictions")
    data = parser.parse_args().data
    results = [
        result
        for check in (reference_columns, official_hotpot, two_f1_definitions, ruler_scores)
        for result in check(data)
    ]
    for name, equal, total in results:
        print(f"{name:40} {equal} of {total}{'' if equal == total else '   DIFFERS'}")
    return int(any(equal != total for _, equal, total in results))


if __name__ == "__main__":
    sys.exit(main())
