"""What a memory agent is compared with sees what it should of the text, and says what it did not see."""

import re

import pytest

from memjax.agents.no_context import NoContext
from memjax.agents.oracle import Oracle, own_text
from memjax.agents.single import Single, SingleTruncated
from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.rollout.fake import ScriptedClient
from memjax.trajectory import Task
from tests.episodes.drive import TOKENIZER, drive

BUDGETS = {"question": 64, "answer": 32}
TEXT = "".join(f"<{n:03}>" for n in range(400))  # 2,000 bytes, each place known by its number


def client(window):
    return ScriptedClient(lambda prompt, params: r"\boxed{x}", window=window)


async def run(agent, asked, context=TEXT, **fields):
    return await drive(agent(**BUDGETS), Task("t", "Which?", context, ("x",), **fields), asked)


def shown(asked):
    (prompt,) = asked.prompts
    return prompt.messages[0].text(TOKENIZER.decode)


async def test_a_text_past_the_window_loses_its_middle_and_the_loss_is_counted():
    asked = client(1000)
    trajectory = await run(SingleTruncated, asked)
    kept = trajectory.counters["document_tokens"]
    assert kept + trajectory.counters["truncated_tokens"] == len(TEXT)
    assert TEXT[: kept // 2] in shown(asked)
    assert TEXT[-(kept // 2) :] in shown(asked)
    assert "<200>" not in shown(asked)
    assert 1000 - 16 <= len(TOKENIZER.render(asked.prompts[0].messages)) + BUDGETS["answer"] <= 1000


async def test_a_text_that_fits_is_shown_whole():
    asked = client(5000)
    trajectory = await run(SingleTruncated, asked)
    assert TEXT in shown(asked)
    assert trajectory.counters["truncated_tokens"] == 0


async def test_the_plain_baseline_refuses_where_the_cut_one_reads():
    assert "window of scripted (1000)" in (await run(Single, client(1000))).error


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (None, "window of scripted is not known"),
        (200, "question 6 .* but the window of scripted holds 200: lower the budgets"),
        (
            sum(SingleTruncated(**BUDGETS).longest_turn("Which?", TOKENIZER).values()) + 15,
            "leaves 15 for a text: raise",
        ),
    ],
)
async def test_a_window_that_cannot_be_cut_to_is_that_samples_failure(window, message):
    trajectory = await run(SingleTruncated, client(window))
    assert trajectory.answer == ""
    assert re.search(message, trajectory.error)


def scattered(tmp_path):
    write_corpus(tmp_path / "pool.jsonl", ["Far\nNothing.", "Own\nThe answer is x.", "Mine\nAlso ours."])
    corpus = Corpus(tmp_path / "pool.jsonl")
    context = Documents(corpus, (0, 2, 1))
    whole = "".join(context.pieces())
    evidence = [{"title": "Own", "start": whole.index("Own"), "end": len(whole)}]
    return corpus, Task("t", "Which?", context, ("x",), extra={"own": [2, 3], "evidence": evidence, "seed": 1})


async def test_the_oracle_sees_the_questions_own_paragraphs_and_no_other(tmp_path):
    corpus, task = scattered(tmp_path)
    own = "Document 1:\nMine\nAlso ours.\n\nDocument 2:\nOwn\nThe answer is x."
    assert own_text(task) == own
    asked = client(None)
    trajectory = await run(Oracle, asked, task.context, extra=task.extra)
    assert trajectory.counters["document_tokens"] == len(own)
    assert f"<text>\n{own}\n</text>" in shown(asked)
    corpus.close()


def test_without_own_paragraphs_the_oracle_sees_the_evidence(tmp_path):
    corpus, task = scattered(tmp_path)
    assert own_text(Task("t", "q", task.context, ("x",), extra={"evidence": task.extra["evidence"]})) == (
        "Own\nThe answer is x."
    )
    corpus.close()


async def test_a_task_that_does_not_know_its_evidence_has_no_oracle():
    asked = client(None)
    trajectory = await run(Oracle, asked)
    assert trajectory.error.startswith("task 't' does not say which passages hold its answer")
    assert not asked.prompts


async def test_without_context_only_the_question_is_shown():
    asked = client(None)
    trajectory = await run(NoContext, asked)
    assert "Which?" in shown(asked)
    assert "<001>" not in shown(asked)
    assert trajectory.counters["document_tokens"] == 0
