from pathlib import Path

import pytest

from memjax.eval.config import EvalConfig
from memjax.eval.suites import SUITES
from memjax.eval.tasks import TaskMaker, cells_of, tokens_of
from memjax.rollout.fake import ByteTokenizer

HOTPOTQA = Path(__file__).parents[1] / "data" / "multihop" / "hotpotqa_40.json.gz"


@pytest.mark.parametrize(
    ("label", "kilo", "tokens"),
    [("7k", 1000, 7000), ("3.5M", 1000, 3_500_000), ("8k", 1024, 8192), ("1m", 1024, 1 << 20), ("900", 1024, 900)],
)
def test_lengths_mean_what_the_suite_says(label, kilo, tokens):
    assert tokens_of(label, kilo) == tokens


@pytest.mark.parametrize("label", ["", "k", "-1k", "7kk", "0"])
def test_a_length_that_is_none_is_refused(label):
    with pytest.raises(ValueError, match="a length is a number of tokens"):
        tokens_of(label, 1000)


def test_published_rows_name_lengths_of_their_suite_and_a_source():
    for suite in SUITES.values():
        assert bool(suite.published) == bool(suite.source)
        for row in suite.published:
            assert set(row.scores) <= set(suite.lengths)
            # Right-or-wrong scores of 128 samples are multiples of 1/128, to the two decimals that were printed.
            if suite.name == "ruler-hotpotqa":
                assert all(abs(score * 1.28 - round(score * 1.28)) < 0.007 for score in row.scores.values())


def test_question_tasks_of_ruler_wait_for_their_data(tmp_path):
    bare = EvalConfig(suite="ruler", out=tmp_path, lengths=("8k",))
    assert len(cells_of(bare)) == 11
    given = EvalConfig(suite="ruler", out=tmp_path, lengths=("8k",), data={"squad": "x", "hotpotqa": "y"})
    assert len(cells_of(given)) == 13
    asked = EvalConfig(suite="ruler", out=tmp_path, tasks=("qa_1",), lengths=("8k",), samples=1)
    with pytest.raises(ValueError, match="qa_1 asks the questions of squad: give --data squad=PATH"):
        list(TaskMaker(asked, ByteTokenizer(), tmp_path).jobs())


def test_every_length_asks_the_same_questions_in_contexts_of_that_length(tmp_path):
    config = EvalConfig(
        suite="ruler-hotpotqa", out=tmp_path, lengths=("20k", "40k"), samples=3, data={"hotpotqa": HOTPOTQA}
    )
    maker = TaskMaker(config, ByteTokenizer(), tmp_path)
    jobs = list(maker.jobs())
    assert [job.cell for job in jobs] == ["ruler-hotpotqa_20k"] * 3 + ["ruler-hotpotqa_40k"] * 3
    assert [job.task.id for job in jobs[:3]] == [job.task.id for job in jobs[3:]]
    for job in jobs:
        tokens = int(job.cell.removeprefix("ruler-hotpotqa_").removesuffix("k")) * 1000
        text = "".join(job.task.context.pieces())
        assert 0.99 * tokens <= len(text.encode()) + len(job.task.question.encode()) <= tokens
    more = TaskMaker(config.model_copy(update={"samples": 5}), ByteTokenizer(), tmp_path)
    assert [job.doc_hash for job in more.jobs()][:3] == [job.doc_hash for job in jobs[:3]]
    maker.close()
    more.close()


def test_more_questions_than_there_are_is_refused(tmp_path):
    config = EvalConfig(suite="ruler-hotpotqa", out=tmp_path, samples=41, data={"hotpotqa": HOTPOTQA})
    with pytest.raises(ValueError, match="has 40 questions, but 41 samples were asked for: lower --samples"):
        next(TaskMaker(config, ByteTokenizer(), tmp_path).jobs())


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 99},
        {"agent": "single"},
        {"preset": "memagent"},
        {"layout": "chunk_first"},
        {"seed": 1},
        {"samples": 9},
        {"lengths": ("2k",)},
        {"tasks": ("vt",)},
        {"window": 999},
    ],
    ids=str,
)
def test_what_a_score_may_depend_on_is_part_of_the_identity(changes):
    config = EvalConfig(suite="smoke", out="out")
    assert EvalConfig(suite="smoke", out="out", **changes).identity() != config.identity()


def test_where_and_how_fast_a_run_goes_is_not():
    config = EvalConfig(suite="smoke", out="out")
    moved = EvalConfig(suite="smoke", out="elsewhere", concurrency=3, url="http://x", ray=True, chunk_tokens=512)
    assert moved.identity() == config.identity()  # 512 is what the suite says anyway
