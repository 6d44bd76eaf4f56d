import asyncio
import re

import pytest

from memjax.agents.base import Budgets
from memjax.agents.memagent import MemAgent
from memjax.agents.single import SingleAgent
from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.eval.baselines import MiddleCut, load_no_context_prompt, make_agent, own_text, shown_task
from memjax.eval.config import EvalConfig
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.trajectory import Task

TOKENIZER = ByteTokenizer()
BUDGETS = Budgets(question=64, chunk=64, memory=64, answer=32)
TEXT = "".join(f"<{n:03}>" for n in range(400))  # 2,000 bytes, each place known by its number


def client(window):
    return ScriptedClient(lambda prompt, params: r"\boxed{x}", window=window)


def run(agent, asked, context=TEXT):
    return asyncio.run(agent.run(Task("t", "Which?", context, ("x",)), asked))


def test_a_text_past_the_window_loses_its_middle_and_the_loss_is_counted():
    asked = client(1000)
    trajectory = run(MiddleCut(SingleAgent(TOKENIZER, budgets=BUDGETS)), asked)
    prompt = asked.prompts[0].messages[0].text(TOKENIZER.decode)
    kept = int(trajectory.counters["document_tokens"])
    assert kept + trajectory.counters["truncated_tokens"] == len(TEXT)
    assert TEXT[: kept // 2] in prompt
    assert TEXT[-(kept // 2) :] in prompt
    assert "<200>" not in prompt
    assert 1000 - 16 <= len(TOKENIZER.render(asked.prompts[0].messages)) + BUDGETS.answer <= 1000


def test_a_text_that_fits_is_shown_whole():
    asked = client(5000)
    trajectory = run(MiddleCut(SingleAgent(TOKENIZER, budgets=BUDGETS)), asked)
    assert TEXT in asked.prompts[0].messages[0].text(TOKENIZER.decode)
    assert trajectory.counters["truncated_tokens"] == 0


def test_the_plain_baseline_refuses_where_the_cut_one_reads():
    assert "window of scripted (1000)" in run(SingleAgent(TOKENIZER, budgets=BUDGETS), client(1000)).error


@pytest.mark.parametrize(
    ("window", "message"),
    [(None, "window of scripted is not known"), (200, "leaves -?[0-9]+ for a text: raise --window")],
)
def test_a_window_that_cannot_be_cut_to_is_that_samples_failure(window, message):
    trajectory = run(MiddleCut(SingleAgent(TOKENIZER, budgets=BUDGETS)), client(window))
    assert trajectory.answer == ""
    assert re.search(message, trajectory.error)


def scattered(tmp_path):
    write_corpus(tmp_path / "pool.jsonl", ["Far\nNothing.", "Own\nThe answer is x.", "Mine\nAlso ours."])
    corpus = Corpus(tmp_path / "pool.jsonl")
    context = Documents(corpus, (0, 2, 1))
    whole = "".join(context.pieces())
    evidence = [{"title": "Own", "start": whole.index("Own"), "end": len(whole)}]
    return corpus, Task("t", "Which?", context, ("x",), extra={"own": [2, 3], "evidence": evidence, "seed": 1})


def test_the_oracle_sees_the_questions_own_paragraphs_and_no_other(tmp_path):
    corpus, task = scattered(tmp_path)
    assert own_text(task) == "Document 1:\nMine\nAlso ours.\n\nDocument 2:\nOwn\nThe answer is x."
    shown = shown_task(task, "oracle")
    assert (shown.context, shown.extra) == (own_text(task), {"seed": 1})
    corpus.close()


def test_without_own_paragraphs_the_oracle_sees_the_evidence(tmp_path):
    corpus, task = scattered(tmp_path)
    assert own_text(Task("t", "q", task.context, ("x",), extra={"evidence": task.extra["evidence"]})) == (
        "Own\nThe answer is x."
    )
    corpus.close()


def test_a_task_that_does_not_know_its_evidence_has_no_oracle():
    with pytest.raises(ValueError, match="task 't' does not say which passages hold its answer"):
        shown_task(Task("t", "q", "text", ("x",)), "oracle")


def test_without_context_only_the_question_is_shown():
    task = shown_task(Task("t", "Which?", TEXT, ("x",)), "no-context")
    agent = SingleAgent(TOKENIZER, load_no_context_prompt(), BUDGETS)
    asked = client(None)
    asyncio.run(agent.run(task, asked))
    prompt = asked.prompts[0].messages[0].text(TOKENIZER.decode)
    assert "Which?" in prompt
    assert "<001>" not in prompt


@pytest.mark.parametrize(
    ("name", "kind"), [("memagent", MemAgent), ("single", SingleAgent), ("single-truncated", MiddleCut)]
)
@pytest.mark.parametrize("preset", ["greedy", "memagent"])
def test_the_preset_and_the_budgets_reach_the_agent(name, kind, preset, tmp_path):
    config = EvalConfig(suite="smoke", out=tmp_path, agent=name, preset=preset, seed=7, memory_tokens=77)
    agent = make_agent(config, TOKENIZER).agent
    assert isinstance(agent, kind)
    inner = agent.single if isinstance(agent, MiddleCut) else agent
    assert (inner.sampling.temperature, inner.sampling.top_p) == ((0.0, 1.0) if preset == "greedy" else (0.7, 0.95))
    assert (inner.sampling.seed, inner.budgets.memory, inner.budgets.chunk) == (7, 77, 512)


def test_other_prompts_have_another_hash(tmp_path):
    hashes = {
        make_agent(EvalConfig(suite="smoke", out=tmp_path, **changes), TOKENIZER).prompt_hash
        for changes in ({}, {"layout": "chunk_first"}, {"agent": "single"}, {"agent": "no-context"})
    }
    assert len(hashes) == 4
