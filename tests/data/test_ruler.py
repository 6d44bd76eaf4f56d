import collections
import re
import tracemalloc

import pytest

from memjax.data.corpus import Corpus
from memjax.data.haystack import Haystack
from memjax.data.hotpotqa import Pool, write_pool
from memjax.data.multihop import read_examples
from memjax.data.ruler import ANSWER_TOKENS, NIAH, QUESTIONS, Questions, Suite
from memjax.data.ruler.frequency import CommonWordsDraft
from memjax.data.ruler.keys import draw_distinct, vocabulary
from memjax.data.seeds import stream
from memjax.tokenizer import Tokenizer
from tests.data.multihop_data import HOTPOTQA, SQUAD, WordTokenizer
from tests.qwen_tokenizer import write_qwen_tokenizer

LENGTH = 4096
OWN_TEXT = [name for name in ANSWER_TOKENS if name not in QUESTIONS]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    sets = {}
    for name, path, kind in (("qa_1", SQUAD, "squad"), ("qa_2", HOTPOTQA, "hotpotqa")):
        examples = read_examples(path, kind)
        write_pool(folder / f"{name}.jsonl", examples)
        sets[name] = Questions(tuple(examples), Pool(Corpus(folder / f"{name}.jsonl"), WordTokenizer()))
    return sets


@pytest.fixture(scope="module")
def suite(questions):
    return Suite(WordTokenizer(), LENGTH, 0, Haystack.open(), questions)


@pytest.fixture(scope="module")
def tasks(suite):
    """Three samples of every task, with their texts."""
    made = {}
    for name in ANSWER_TOKENS:
        guess = suite.guess(name)
        samples = [suite.sample(name, index, guess) for index in range(3)]
        made[name] = [(task, "".join(task.context.pieces())) for task in samples]
    return made


@pytest.mark.parametrize("name", ANSWER_TOKENS)
def test_lengths_are_within_one_percent_and_never_over(tasks, name):
    tokenizer = WordTokenizer()
    for task, text in tasks[name]:
        used = tokenizer.count(text) + tokenizer.count(task.question) + ANSWER_TOKENS[name]
        assert used == task.extra["length"]
        assert used == task.extra["context_tokens"] + tokenizer.count(task.question) + ANSWER_TOKENS[name]
        one_line_of_uuids = 60 if name == "niah_multikey_3" else 0
        assert LENGTH - max(LENGTH // 100, one_line_of_uuids) <= used <= LENGTH


def test_lengths_are_those_of_the_text_as_a_whole_in_the_tokens_of_qwen(tmp_path):
    tokenizer = Tokenizer.load(write_qwen_tokenizer(tmp_path))
    length = 12_288  # more than one block of the stream that is measured
    suite = Suite(tokenizer, length, 0, Haystack.open(), {})
    for name in ("niah_single_2", "niah_multikey_3", "cwe"):
        task = suite.sample(name, 0, suite.guess(name))
        used = tokenizer.count("".join(task.context.pieces())) + tokenizer.count(task.question) + ANSWER_TOKENS[name]
        assert length - length // 100 <= used == task.extra["length"] <= length


@pytest.mark.parametrize("name", ANSWER_TOKENS)
def test_a_sample_depends_on_seed_and_index_alone(suite, tasks, name):
    again = suite.sample(name, 2, suite.guess(name))
    task, text = tasks[name][2]
    assert "".join(again.context.pieces()) == "".join(again.context.pieces()) == text
    assert (again.question, again.answers, again.extra) == (task.question, task.answers, task.extra)
    assert len({text for _, text in tasks[name]}) == 3
    assert len({task.extra["seed"] for task, _ in tasks[name]}) == 3


@pytest.mark.parametrize("name", NIAH)
def test_needles_stand_once_where_the_evidence_says(tasks, name):
    spec = NIAH[name]
    for task, text in tasks[name]:
        assert len(task.answers) == len(set(task.answers)) == spec.queries * spec.values
        for answer, place in zip(
            sorted(task.answers),
            sorted(task.extra["evidence"], key=lambda place: place["text"].split()[-1]),
            strict=True,
        ):
            assert text.count(answer) == 1
            assert text[place["start"] : place["end"]].strip() == place["text"]
            assert place["text"].endswith(f" is {answer}.")
        for key in re.findall(r"(?<=for ).*", task.question.partition("?")[0])[0].replace("and ", "").split(", "):
            assert len(re.findall(rf"for {key} is", text)) == spec.values


@pytest.mark.parametrize("name", NIAH)
def test_needles_have_the_kinds_and_numbers_of_ruler(tasks, name):
    spec = NIAH[name]
    forms = {
        "words": r"[a-z]+-[a-z]+",
        "numbers": r"\d{7}",
        "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f-]{17}",
    }
    for task, text in tasks[name]:
        needles = re.findall(rf"A secret \w+ for ({forms[spec.key]}) is ({forms[spec.value]})\.", text)
        assert len(needles) == text.count("A secret ")
        if spec.haystack != "needles":
            assert len(needles) == max(spec.keys, spec.queries) * spec.values
        else:
            assert text.count("\n") == len(needles)
        assert task.metric == "ruler_all"


def test_needles_in_an_essay_stand_between_sentences(tasks):
    for name, spec in NIAH.items():
        if spec.haystack == "essay":
            for _, text in tasks[name]:
                for before in re.split(r" A secret ", text)[:-1]:
                    assert not before or re.search(r"[.!?][\"'”’)]*$", before[-4:])


def test_needle_depths_cover_the_whole_text(suite):
    guess = suite.guess("niah_single_1")
    depths = []
    for index in range(60):
        task = suite.sample("niah_single_1", index, guess)
        size = sum(map(len, task.context.pieces()))
        depths.append(task.extra["evidence"][0]["start"] / size)
    counts = collections.Counter(int(depth * 4) for depth in depths)
    assert sum((counts[quarter] - 15) ** 2 / 15 for quarter in range(4)) < 16.3  # the 0.999 quantile, 3 degrees


def test_a_variable_chain_leads_in_order_from_the_value_to_every_answer(tasks):
    for task, text in tasks["vt"]:
        value = re.search(r"\d{5}", task.question)[0]
        assignments = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\n", text)
        assert [name for name, _ in assignments] == list(task.answers)
        assert [source for _, source in assignments] == [value, *task.answers[:-1]]
        assert [place["text"] for place in task.extra["evidence"]] == re.findall(r"VAR .*", text)


def test_common_words_come_thirty_times_and_all_others_three_times(tasks):
    for task, text in tasks["cwe"]:
        items = re.findall(r"(\d+)\. (\S+)", text)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = collections.Counter(word for _, word in items)
        assert {word for word, count in counts.items() if count == 30} == set(task.answers)
        assert set(counts.values()) == {30, 3}
        assert len(task.answers) == 10


def test_a_short_list_repeats_its_words_less(questions):
    suite = Suite(WordTokenizer(), 2048, 0, Haystack.open(), questions)
    task = suite.sample("cwe", 0, suite.guess("cwe"))
    counts = collections.Counter(word for _, word in re.findall(r"(\d+)\. (\S+)", "".join(task.context.pieces())))
    assert set(counts.values()) == {6, 1}


def test_a_list_longer_than_the_vocabulary_goes_on_in_pairs():
    words = len(vocabulary("noun", "adjective", "verb"))
    draft = CommonWordsDraft(seed=1, often=30, seldom=3)
    counts = collections.Counter(piece.split(". ")[1] for piece in draft.pieces(words + 5000))
    assert len(counts) == words + 5010
    assert {word for word, count in counts.items() if count == 30} == set(draft.answers)
    common = set(draft.answers)
    assert not any(set(word.split("-")) & common for word in counts if "-" in word)


def test_coded_words_follow_the_zeta_law(tasks):
    for task, text in tasks["fwe"]:
        ranked = collections.Counter(text.split()).most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == task.answers
        for rank, (_, count) in enumerate(ranked[:8], start=1):
            assert abs(count - ranked[0][1] / rank**2) <= 1
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])


def test_questions_come_in_file_order_with_their_own_paragraphs(tasks, questions):
    for name in QUESTIONS:
        for index, (task, text) in enumerate(tasks[name]):
            example = questions[name].examples[index]
            assert (task.question, task.answers, task.metric) == (example.question, example.answers, "ruler_part")
            for place in task.extra["evidence"]:
                assert text[place["start"] : place["end"]] in example.paragraphs
    assert all(any(answer in text for answer in task.answers) for task, text in tasks["qa_1"])


@pytest.mark.parametrize("name", OWN_TEXT)
def test_a_longer_text_takes_hardly_more_memory(suite, name):
    draft = suite._draft(name, seed=3)
    units = {"fwe": 40_000, "cwe": 4000, "vt": 4000}.get(name) or {"noise": 4000, "essay": 30_000, "needles": 3000}[
        NIAH[name].haystack
    ]

    def peak_and_size(units):
        tracemalloc.start()
        size = sum(map(len, draft.pieces(units)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, size

    peak_and_size(1)  # what is imported or read on first use
    (peak, size), (longer_peak, longer_size) = peak_and_size(units // 10), peak_and_size(units)
    # To hold the pieces of a text takes ten times its size. The counting tasks hold four bytes for each of their words.
    share = 1.5 if name in ("cwe", "fwe") else 0.7
    assert longer_peak - peak < share * (longer_size - size)


def test_a_haystack_that_is_too_short_is_repeated_with_a_note(tmp_path, questions):
    path = tmp_path / "short.txt"
    path.write_text("A short tale about nothing at all. " * 20)
    suite = Suite(WordTokenizer(), LENGTH, 0, Haystack.open([path]), questions)
    task = suite.sample("niah_single_2", 0, suite.guess("niah_single_2"))
    assert task.extra["length"] >= LENGTH - LENGTH // 100
    assert task.extra["haystack_readings"] == -(-"".join(task.context.pieces()).count("tale") // 20) > 1


def test_what_cannot_be_made_is_refused(suite):
    with pytest.raises(ValueError, match="unknown RULER task 'niah'"):
        suite.guess("niah")
    with pytest.raises(ValueError, match="vt does not fit 100 tokens"):
        Suite(WordTokenizer(), 100, 0, suite.essay, {}).guess("vt")
    with pytest.raises(ValueError, match="qa_2 asks questions of a hotpotqa file"):
        Suite(WordTokenizer(), LENGTH, 0, suite.essay, {}).guess("qa_2")
    with pytest.raises(ValueError, match="qa_2 has 40 questions"):
        suite.sample("qa_2", 40, 0)


def test_distinct_values_avoid_what_is_taken():
    taken = frozenset(draw_distinct("numbers", 50, stream(0, "x")))
    assert not taken & set(draw_distinct("numbers", 50, stream(0, "x"), taken))
