from pathlib import Path

import pytest

from memjax.agents.registry import AGENTS
from memjax.data.lengths import parse_length
from memjax.eval.config import EvalConfig
from memjax.eval.session import conversation_tokens, open_evaluator
from memjax.eval.suites import SUITES
from memjax.eval.tasks import TaskMaker, cells_of
from memjax.rollout.connect import Service
from memjax.rollout.fake import ByteTokenizer

HOTPOTQA = Path(__file__).parents[1] / "data" / "multihop" / "hotpotqa_40.json.gz"


@pytest.mark.parametrize(
    ("label", "tokens"), [("7k", 7168), ("3.5M", 3_670_016), ("8k", 8192), ("1m", 1 << 20), ("900", 900)]
)
def test_k_means_1024_in_every_suite(label, tokens):
    assert parse_length(label) == tokens


@pytest.mark.parametrize("label", ["", "k", "-1k", "7kk", "0"])
def test_a_length_that_is_none_is_refused(label):
    with pytest.raises(ValueError, match="a length is a number of tokens"):
        parse_length(label)


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
        tokens = int(job.cell.removeprefix("ruler-hotpotqa_").removesuffix("k")) * 1024
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
        {"agent": {"chunk": 99}},
        {"agent": "single"},
        {"preset": "memagent"},
        {"agent": {"layout": "chunk_first"}},
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


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("preset", ["greedy", "memagent"])
async def test_the_preset_and_the_budgets_reach_the_agent(name, preset, tmp_path):
    config = EvalConfig(suite="smoke", out=tmp_path, agent={"name": name, "answer": 77}, preset=preset, seed=7)
    evaluator = open_evaluator(config, Service("http://localhost:9", "m"), 4096, {}, ByteTokenizer())
    assert isinstance(evaluator.agent, AGENTS[name])
    assert (evaluator.preset.name, evaluator.seed) == (preset, 7)
    assert (evaluator.agent.answer, evaluator.agent.question) == (77, 128)  # 128 is what the suite says
    assert getattr(evaluator.agent, "chunk", 512) == 512
    await evaluator.client.close()
    evaluator.pool.close()


def test_other_prompts_have_another_hash():
    agents = ("memagent", {"layout": "chunk_first"}, "single", "no-context")
    assert len({EvalConfig(suite="smoke", out="out", agent=agent).agent.prompt_hash for agent in agents}) == 4


def test_prompts_are_known_by_their_hash_and_not_by_their_place(tmp_path):
    moved = EvalConfig(suite="smoke", out="out", agent={"prompts": tmp_path})
    assert moved.identity() == EvalConfig(suite="smoke", out="out").identity()


@pytest.mark.parametrize(("name", "needs"), [("memagent", 0), ("no-context", 0), ("oracle", 8192), ("single", None)])
def test_a_local_engine_is_sized_by_what_the_agent_shows_at_once(name, needs, tmp_path):
    config = EvalConfig(suite="hotpotqa", out=tmp_path, agent=name, data={"hotpotqa": HOTPOTQA})
    if needs is None:
        with pytest.raises(ValueError, match="hotpotqa does not say how long its texts are: give --window"):
            conversation_tokens(config, ByteTokenizer())
        config = config.model_copy(update={"window": 20_000})
        assert conversation_tokens(config, ByteTokenizer()) == 20_000
    else:
        longest = sum(config.agent.longest_turn("?", ByteTokenizer(), 0).values())
        assert conversation_tokens(config, ByteTokenizer()) == longest + config.agent.question + needs


def test_where_and_how_fast_a_run_goes_is_not():
    config = EvalConfig(suite="smoke", out="out")
    moved = EvalConfig(suite="smoke", out="elsewhere", concurrency=3, url="http://x", ray=True, agent={"chunk": 512})
    assert moved.identity() == config.identity()  # 512 is what the suite says anyway
