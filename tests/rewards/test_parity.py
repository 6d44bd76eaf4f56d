"""Our metrics give the values that the reference implementations gave; data/SOURCE.txt says whose they are."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

from memjax.rewards import hotpotqa, score

DATA = Path(__file__).parent / "data"
# By its path: google-jetstream installs a package that is called benchmarks too.
BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "metric_parity.py"))

OFFICIAL_HOTPOT = {
    "em": 0.34301181102362205,
    "f1": 0.44825690172047067,
    "prec": 0.4756815944552104,
    "recall": 0.4513441078278677,
    "sp_em": 0.07135826771653543,
    "sp_f1": 0.3327209098862625,
    "sp_prec": 0.36540354330708663,
    "sp_recall": 0.3135029996250471,
    "joint_em": 0.04625984251968504,
    "joint_f1": 0.19626582013912744,
    "joint_prec": 0.22484850089530647,
    "joint_recall": 0.18807256965475452,
}


def rows(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_every_metric_equals_its_reference_on_published_predictions():
    table = rows("qa_metric_parity_part.jsonl.gz")
    assert len(BENCHMARK["our_columns"](table[0])) == 10
    for row in table:
        assert not BENCHMARK["differing_columns"](row), row


def test_the_twelve_official_hotpot_numbers_come_out():
    table = {str(i): row for i, row in enumerate(rows("hotpot_official.jsonl.gz"))}
    ours = hotpotqa.official_metrics(
        answers={key: row[2] for key, row in table.items()},
        supporting_facts={key: row[3] for key, row in table.items()},
        examples=[{"_id": key, "answer": row[0], "supporting_facts": row[1]} for key, row in table.items()],
    )
    assert list(ours) == list(OFFICIAL_HOTPOT)
    assert ours == pytest.approx(OFFICIAL_HOTPOT, abs=1e-12)


def test_the_two_definitions_of_f1_are_told_apart():
    differing = rows("two_f1.jsonl.gz")
    assert len(differing) == 53
    for _, prediction, gold, _, published in differing:
        assert score("f1", prediction, [gold]) == pytest.approx(published, abs=1e-12)
        assert score("hotpot_f1", prediction, [gold]) == 0.0 < published


@pytest.mark.parametrize(("task", "published"), [("qa_1", (84.0, 80.6, 84.0)), ("qa_2", (58.4, 55.0, 55.6))])
def test_ruler_qa_scores_are_the_published_ones(task, published):
    samples = [row for row in rows("ruler_qa.jsonl.gz") if row[0] == task]
    for run, expected in enumerate(published):
        values = [score("ruler_part", predictions[run], golds) for _, golds, predictions in samples]
        assert round(100 * sum(values) / len(values), 2) == expected
