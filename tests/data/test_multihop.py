import json

import pytest

from memjax.data.multihop import read_examples
from tests.data.multihop_data import HOTPOTQA, SQUAD

TWO_WIKI = {
    "_id": "w1",
    "type": "compositional",
    "question": "Where was the director of the film born?",
    "context": [
        ["Some Film", ["It was directed by Ann.", " It is long."]],
        ["Ann", ["Ann was born in Oslo."]],
        ["B", ["-"]],
    ],
    "supporting_facts": [["Some Film", 0], ["Ann", 0]],
    "evidences": [["Some Film", "director", "Ann"], ["Ann", "place of birth", "Oslo"]],
    "answer": "Oslo",
}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Other", "paragraph_text": "Nothing.", "is_supporting": False},
        {"idx": 1, "title": "River", "paragraph_text": "It flows through Lyon.", "is_supporting": True},
    ],
    "question": "Which city?",
    "question_decomposition": [{"id": 1}, {"id": 2}],
    "answer": "Lyon",
    "answer_aliases": ["Lyons", "Lyon"],
    "answerable": True,
}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_hotpotqa_supporting_paragraphs_are_those_of_its_facts():
    examples = read_examples(HOTPOTQA, "hotpotqa")
    assert len(examples) == 40
    assert all(2 <= len(example.paragraphs) <= 10 and len(example.supporting) == 2 for example in examples)
    for example in examples:
        if example.answers[0] not in ("yes", "no"):
            assert any(example.answers[0] in example.paragraphs[i] for i in example.supporting)


def test_squad_leaves_out_what_has_no_answer_and_keeps_the_article():
    examples = read_examples(SQUAD, "squad")
    for example in examples:
        assert len(example.paragraphs) == 20
        assert all(answer in example.paragraphs[example.supporting[0]] for answer in example.answers)
        assert len(set(example.answers)) == len(example.answers)
    with_article = [example for example in examples if example.paragraphs == examples[0].paragraphs]
    assert len(with_article) < len(examples)


def test_two_wiki_has_the_form_of_hotpotqa(tmp_path):
    [example] = read_examples(write(tmp_path / "dev.json", json.dumps([TWO_WIKI])), "2wiki")
    assert (example.id, example.answers, example.supporting) == ("w1", ("Oslo",), (0, 1))
    assert example.paragraphs[0] == "Some Film\nIt was directed by Ann. It is long."


def test_musique_has_aliases_and_answerable_questions_only(tmp_path):
    lines = [MUSIQUE, MUSIQUE | {"id": "2", "answerable": False}]
    [example] = read_examples(write(tmp_path / "dev.jsonl", "\n".join(map(json.dumps, lines))), "musique")
    assert (example.answers, example.supporting, example.extra) == (("Lyon", "Lyons"), (1,), {"hops": 2})
    assert example.paragraphs[1] == "River\nIt flows through Lyon."


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("hotpotqa", "", "is empty"),
        ("hotpotqa", "[]", "holds no answerable question"),
        ("hotpotqa", json.dumps([TWO_WIKI, TWO_WIKI]), "repeats the id 'w1'"),
        ("hotpotqa", json.dumps([TWO_WIKI, MUSIQUE]), "element 2 is not hotpotqa"),
        ("2wiki", json.dumps([TWO_WIKI | {"answer": " "}]), "text that is not empty"),
        ("2wiki", json.dumps([TWO_WIKI | {"context": [["only a title"]]}]), "element 1 is not 2wiki"),
        ("musique", json.dumps(MUSIQUE | {"paragraphs": None}), "is not musique"),
        ("squad", json.dumps({"data": [{"title": "T", "paragraphs": [{"qas": []}]}]}), "is not squad"),
        ("squad", json.dumps({"data": []}), "holds no answerable question"),
    ],
)
def test_a_malformed_file_is_named_with_its_record(tmp_path, kind, text, message):
    path = write(tmp_path / "some.json", text)
    with pytest.raises(ValueError, match=rf"some\.json.*{message}"):
        read_examples(path, kind)
