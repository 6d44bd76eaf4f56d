import statistics

import pytest

from memjax.data.corpus import Corpus
from memjax.data.hotpotqa import Pool, apart, sample_seed, split_examples, with_documents, with_length, write_pool
from memjax.data.multihop import Example, read_examples
from tests.data.multihop_data import HOTPOTQA, WordTokenizer


@pytest.fixture(scope="module")
def examples():
    return read_examples(HOTPOTQA, "hotpotqa")


@pytest.fixture(scope="module")
def pool(examples, tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "documents.jsonl"
    write_pool(path, examples)
    return Pool(Corpus(path), WordTokenizer())


def text(task):
    return "".join(task.context.pieces())


class NoTokens:
    def count(self, text):
        return 0

    def encode_stream(self, pieces):
        return iter(())


def test_own_paragraphs_stand_anywhere_with_equal_chance(examples, pool):
    documents, bins, samples = 50, 10, 500
    pool = Pool(pool.corpus, NoTokens())
    counts = [0] * bins
    firsts = []
    for i in range(samples):
        example = examples[i % len(examples)]
        own = with_documents(example, pool, documents, sample_seed(i, example, documents)).extra["own"]
        assert len(own) == len(set(example.paragraphs))
        firsts.append(own[0])
        for position in own:
            counts[(position - 1) * bins // documents] += 1
    expected = sum(counts) / bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < 27.9  # the 0.999 quantile for nine degrees of freedom
    assert statistics.stdev(firsts) > 2  # and not at the same places in every sample


def test_a_context_is_own_paragraphs_and_distractors_each_once(examples, pool):
    task = with_documents(examples[0], pool, 60, seed=1)
    documents = text(task).split("\n\nDocument ")
    assert len(documents) == task.extra["num_docs"] == len(set(task.context.numbers)) == 60
    assert all(paragraph in text(task) for paragraph in examples[0].paragraphs)
    for position in task.extra["own"]:
        assert documents[position - 1].partition(":\n")[2] in examples[0].paragraphs


@pytest.mark.parametrize("length", [3000, 7168, 28_000])
def test_a_length_is_met_within_one_percent_and_never_passed(examples, pool, length):
    for example in examples[:12]:
        task = with_length(example, pool, length, seed=3, answer_tokens=32)
        used = pool.tokenizer.count(text(task)) + pool.tokenizer.count(example.question) + 32
        assert used == task.extra["length"]
        assert length - length // 100 <= used <= length


def test_a_length_is_kept_when_documents_cost_more_together_than_one_by_one(examples, pool):
    pool = Pool(pool.corpus, WordTokenizer(surplus=True))
    for example in examples[:12]:
        assert 7168 - 72 <= with_length(example, pool, 7168, seed=3).extra["length"] <= 7168


def test_evidence_names_the_supporting_documents_and_their_places(examples, pool):
    for example in examples[:12]:
        task = with_length(example, pool, 7168, seed=5)
        context = text(task)
        found = [context[place["start"] : place["end"]] for place in task.extra["evidence"]]
        assert sorted(found) == sorted(example.paragraphs[i] for i in example.supporting)
        for place in task.extra["evidence"]:
            assert context[: place["start"]].endswith(f"Document {place['document']}:\n")
            assert abs(pool.tokenizer.count(context[: place["start"]]) - place["token"]) <= 1


def test_a_sample_depends_on_its_seed_alone(examples, pool):
    first = with_length(examples[0], pool, 7168, seed=9)
    with_length(examples[1], pool, 7168, seed=9)
    again = with_length(examples[0], Pool(pool.corpus, WordTokenizer()), 7168, seed=9)
    other = with_length(examples[0], pool, 7168, seed=10)
    assert text(first) == text(again)
    assert first.extra == again.extra
    assert set(first.context.numbers) != set(other.context.numbers)


def test_few_documents_keep_the_supporting_paragraphs(examples, pool):
    for count in (2, 5):
        task = with_documents(examples[0], pool, count, seed=0)
        assert task.extra["num_docs"] == count
        assert len(task.extra["evidence"]) == 2


def test_what_the_pool_cannot_give_is_refused(examples, pool):
    with pytest.raises(ValueError, match="1 documents were asked for"):
        with_documents(examples[0], pool, 1, seed=0)
    with pytest.raises(ValueError, match="100000 documents were asked for"):
        with_documents(examples[0], pool, 100_000, seed=0)
    with pytest.raises(ValueError, match="documents of the pool make"):
        with_length(examples[0], pool, 1_000_000, seed=0)
    with pytest.raises(ValueError, match="the supporting paragraphs"):
        with_length(examples[0], pool, 100, seed=0)


def test_splits_share_no_paragraph(examples):
    train, held_out = split_examples(examples, 10, seed=0)
    assert len(held_out) == 10

    def bodies(part):
        return {paragraph.partition("\n")[2] for example in part for paragraph in example.paragraphs}

    assert not bodies(train) & bodies(held_out)
    originals = {example.id: example for example in examples}
    for example in train:
        original = originals[example.id]
        kept = [example.paragraphs[i] for i in example.supporting]
        assert kept == [original.paragraphs[i] for i in original.supporting]
    touched = [example for example in train if len(example.paragraphs) < 10]
    assert touched or len(train) < 30  # the fixture's examples do share paragraphs


def test_an_example_that_would_lose_its_evidence_is_dropped():
    held_out = Example("1", "q", ("a",), ("T\nshared", "U\nown"), (1,))
    loses_distractor = Example("2", "q", ("a",), ("Other title\nshared", "V\nmine"), (1,))
    loses_evidence = Example("3", "q", ("a",), ("T\n  shared ", "W\nmine too"), (0,))
    [kept] = apart([loses_distractor, loses_evidence], [held_out])
    assert (kept.id, kept.paragraphs, kept.supporting) == ("2", ("V\nmine",), (0,))


@pytest.mark.parametrize("count", [0, 40, 41])
def test_a_split_needs_both_halves(examples, count):
    with pytest.raises(ValueError, match=f"cannot set {count} of 40"):
        split_examples(examples, count, seed=0)
