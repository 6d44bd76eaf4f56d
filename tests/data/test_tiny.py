"""The tiny task can be answered by who reads it, holds more facts than a memory, and has a tokenizer of its own."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from memjax.data import tiny
from memjax.data.__main__ import app
from memjax.data.tasks import read_tasks
from memjax.data.tiny import CHUNK_WORDS, TinyTasks, facts_in, replies
from memjax.rewards import score
from memjax.rewards.answers import extract_answer
from memjax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    tiny.write_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_needed_facts_are_in_the_document_once_and_nothing_contradicts_them(hops: int) -> None:
    tasks = TinyTasks(min_chunks=3, max_chunks=6, hops=hops)
    for task in map(tasks.task, range(50)):
        facts = facts_in(task.context)
        chain = task.extra["chain"]
        assert [key for key, _ in facts if key in chain] == sorted(chain, key=[key for key, _ in facts].index)
        targets = dict(facts)
        assert ([*chain[1:], *task.answers]) == [targets[key] for key in chain]


def test_no_fact_is_split_between_two_chunks() -> None:
    task = TinyTasks(min_chunks=40, max_chunks=40).task(0)
    words = task.context.split()
    assert len(words) == 40 * CHUNK_WORDS
    by_chunk = [facts_in(" ".join(words[i : i + CHUNK_WORDS])) for i in range(0, len(words), CHUNK_WORDS)]
    assert [fact for facts in by_chunk for fact in facts] == facts_in(task.context)
    assert len(facts_in(task.context)) > 10 * tiny.CAPACITY
    assert max(map(len, by_chunk)) == 2


def test_a_task_depends_on_its_number_and_seed_alone() -> None:
    assert TinyTasks(seed=1).task(7) == TinyTasks(seed=1).task(7)
    assert len({TinyTasks(seed=seed).task(index).context for seed in range(3) for index in range(3)}) == 9


@pytest.mark.parametrize("hops", [1, 2])
def test_the_oracle_is_right_and_the_question_blind_are_not(hops: int) -> None:
    tasks = [TinyTasks(min_chunks=12, max_chunks=12, hops=hops).task(i) for i in range(100)]

    def accuracy(policy: str) -> float:
        rng = random.Random(0)
        return sum(score(t.metric, extract_answer(replies(t, policy, rng)[-1]), t.answers) for t in tasks) / len(tasks)

    assert accuracy("oracle") == 1
    for policy in set(tiny.POLICIES) - {"oracle"}:
        assert accuracy(policy) < 0.5


@pytest.mark.parametrize("policy", tiny.POLICIES)
def test_a_memory_fits_its_budget_of_ten_tokens(policy: str, tokenizer: Tokenizer) -> None:
    task = TinyTasks(min_chunks=12, max_chunks=12, hops=2).task(0)
    *memories, answer = replies(task, policy, random.Random(0))
    assert len(memories) == 12
    assert all(tokenizer.count(memory) + 1 <= 10 for memory in memories)
    assert tokenizer.count(answer) == 3


def test_recall_lists_every_fact_that_was_shown() -> None:
    for seed in range(50):
        _, memory, chunk, reply = tiny.recall_example(random.Random(seed))
        assert sorted(facts_in(reply)) == sorted(facts_in(memory) + facts_in(chunk))
        assert len(chunk.split()) == CHUNK_WORDS


def test_every_word_is_one_token_streamed_or_whole(tokenizer: Tokenizer) -> None:
    text = " ".join(TinyTasks(min_chunks=800, max_chunks=800).task(i).context for i in range(2))
    assert len(text) > 1 << 16
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == " " + text
    assert list(tokenizer.encode_stream([text[:1001], text[1001:]])) == ids
    assert tokenizer.encode("value k01") == tokenizer.encode(" value") + tokenizer.encode("k01 ")
    assert tokenizer.decode(tokenizer.encode("martian")) == "<unk>"
    assert (tokenizer.size, tokenizer.eos_ids, tokenizer.pad_id) == (109, (0,), 0)


def test_transformers_reads_the_tokenizer(tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer.source)
    text = TinyTasks().task(3).context
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)).strip() == text


def test_the_command_writes_the_generators_tasks(tmp_path) -> None:
    out = tmp_path / "tasks.jsonl"
    arguments = ["tiny", "--out", str(out), "--chunks", "3", "--samples", "2", "--hops", "2", "--seed", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 documents of 72 words (seed 5)" in result.stdout
    source = TinyTasks(min_chunks=3, max_chunks=3, hops=2, seed=5)
    assert list(read_tasks(out)) == [source.task(0), source.task(1)]
    assert CliRunner().invoke(app, arguments).exit_code == 2  # it would be replaced
