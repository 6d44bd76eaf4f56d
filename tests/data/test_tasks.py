import gzip
import json
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data import json_rows
from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.data.tasks import TextFile, read_tasks, write_tasks
from memjax.trajectory import Task, TextSource

HOTPOT = {
    "_id": "5a8b",
    "question": "Which river?",
    "answer": "Seine",
    "supporting_facts": [["Paris", 0], ["Île", 1]],
    "context": [["Île", ["An island.", " In the river."]], ["Rome", ["A city."]], ["Paris", ["On the Seine."]]],
    "type": "bridge",
    "level": "hard",
}
OWN = {"id": "1", "question": "Which river?", "context": "Paris is on the Seine.", "answers": ["Seine"]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text(context):
    return context if isinstance(context, str) else "".join(context.pieces())


def test_tasks_written_are_the_tasks_read(tmp_path):
    (tmp_path / "book.txt").write_text("naïve 北京\r\n", encoding="utf-8", newline="")
    write_corpus(tmp_path / "corpus.jsonl", ["first\nline", "second", "third"])
    corpus = Corpus(tmp_path / "corpus.jsonl")
    tasks = [
        Task("a", "Which?", "Paris\u2028 is 北京.", ("Seine", "La Seine")),
        Task("b", "Which?", TextFile(tmp_path / "book.txt"), ("Seine",), "f1", "group", {"level": 3, "at": [1, 2]}),
        Task("c", "Which?", Documents(corpus, (2, 0)), ("Seine",)),
    ]
    assert write_tasks(tmp_path / "tasks.jsonl", iter(tasks)) == 3
    read = list(read_tasks(tmp_path / "tasks.jsonl"))
    assert [{**vars(task), "context": text(task.context)} for task in read] == [
        {**vars(task), "context": text(task.context)} for task in tasks
    ]
    assert text(read[2].context) == "Document 1:\nthird\n\nDocument 2:\nfirst\nline"
    assert all(isinstance(task.context, TextSource) for task in read[1:])
    corpus.close()


def test_a_task_file_moves_with_its_folder(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "book.txt").write_text("words")
    write_tasks(folder / "tasks.jsonl", [Task("a", "Which?", TextFile(folder / "book.txt"), ("x",))])
    (task,) = read_tasks(folder.rename(tmp_path / "there") / "tasks.jsonl")
    assert text(task.context) == "words"


def test_writing_that_fails_leaves_no_task_file(tmp_path):
    def tasks():
        yield Task("a", "Which?", "text", ("x",))
        raise RuntimeError("the generator broke")

    with pytest.raises(RuntimeError):
        write_tasks(tmp_path / "tasks.jsonl", tasks())
    assert not (tmp_path / "tasks.jsonl").exists()


NVIDIA = [
    (
        "niah_single_1/validation.jsonl",
        "Some special magic numbers are hidden.\nThe grass is green.\nWhat is the number for x in the text?",
        " The special magic number for x in the text is",
        ("What is the number for x in the text?", "Some special magic numbers are hidden.\nThe grass is green."),
        "ruler_all",
    ),
    (
        "vt/validation.jsonl",
        "Track them.\n\nVAR A = 1\nQuestion: Which? Answer: A\n\nVAR B = 2\nQuestion: Which are 2? Answer: They are",
        "",
        ("Which are 2?", "Track them.\n\nVAR A = 1\nQuestion: Which? Answer: A\n\nVAR B = 2"),
        "ruler_all",
    ),
    (
        "qa_2/validation.jsonl",
        "Documents:\n\nDocument 1:\nParis\n\nAnswer briefly.\n\nQuestion: Where is it?",
        " Answer:",
        ("Where is it?", "Documents:\n\nDocument 1:\nParis\n\nAnswer briefly."),
        "ruler_part",
    ),
]


@pytest.mark.parametrize(("name", "prompt", "prefix", "parts", "metric"), NVIDIA)
def test_rulers_rows_are_cut_into_context_and_question(tmp_path, name, prompt, prefix, parts, metric):
    (tmp_path / name).parent.mkdir()
    row = {"index": 7, "input": prompt + prefix, "outputs": ["1", "2"], "length": 4096, "answer_prefix": prefix}
    (task,) = read_tasks(write(tmp_path / name, row))
    assert (task.question, task.context) == parts
    assert (task.id, task.answers, task.metric) == ("0", ("1", "2"), metric)
    assert task.extra == {"index": 7, "length": 4096, "answer_prefix": prefix}


def test_memagents_evaluation_rows_are_read_with_a_text_or_with_numbers(tmp_path):
    documents = write(tmp_path / "hotpotqa_dev.json", [HOTPOT, HOTPOT])
    rows = [
        {"context": "Document 1:\nParis", "input": "Where?", "answers": ["Seine"], "num_docs": 1, "index": 0},
        {"context": [1, 0], "input": "Where?", "answers": ["Seine"], "num_docs": 2, "index": 0},
    ]
    path = write(tmp_path / "eval_12800.json", rows)
    inline, numbered = read_tasks(path, corpus=documents)
    assert (inline.context, inline.metric, inline.id) == ("Document 1:\nParis", "sub_em", "0")
    # MemAgent numbers the distinct paragraphs of the file in the order of their text.
    assert text(numbered.context) == "Document 1:\nRome\nA city.\n\nDocument 2:\nParis\nOn the Seine."
    assert (numbered.id, numbered.extra) == ("1", {"num_docs": 2, "index": 0})
    with pytest.raises(ValueError, match=r"eval_12800.json, element 2: .* corpus"):
        list(read_tasks(path))


@pytest.mark.parametrize(
    ("name", "metric"),
    [("eval_qa_1_8192.json", "ruler_part"), ("eval_niah_multikey_1_8192.json", "ruler_all"), ("x.json", "ruler_all")],
)
def test_memagents_ruler_files_have_the_metric_of_their_task(tmp_path, name, metric):
    rows = [{"index": 0, "input": "Which?", "context": "text", "outputs": ["1"], "answer_prefix": "", "length": 9}]
    (task,) = read_tasks(write(tmp_path / name, rows))
    assert task.metric == metric


def test_longbenchs_rows_are_read(tmp_path):
    row = {"input": "Where?", "context": "Passage 1:\nParis", "answers": ["Seine"], "length": 3, "_id": "a"}
    (task,) = read_tasks(write(tmp_path / "2wikimqa.jsonl", row), metric="longbench_f1")
    assert (task.question, task.context, task.metric) == ("Where?", "Passage 1:\nParis", "longbench_f1")


def test_memagents_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": f"Which {i}?"}],
            "context": "Document 1:\nParis",
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": ["Seine", "La Seine"]},
            "extra_info": {"index": i, "question": f"Which {i}?", "num_docs": 200},
        }
        for i in range(40)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    tasks = list(read_tasks(tmp_path / "train.parquet"))
    assert [task.question for task in tasks] == [f"Which {i}?" for i in range(40)]
    assert tasks[3].answers == ("Seine", "La Seine")
    assert (tasks[3].metric, tasks[3].extra["index"]) == ("memagent_reward", 3)
    assert {task.metric for task in read_tasks(tmp_path / "train.parquet", metric="f1")} == {"f1"}


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="uv sync --extra parquet"):
        next(read_tasks(tmp_path / "train.parquet"))


@pytest.mark.parametrize("packed", [False, True])
def test_hotpotqas_original_json_is_read(tmp_path, packed):
    path = tmp_path / ("dev.json.gz" if packed else "dev.json")
    data = json.dumps([HOTPOT], indent=1).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    (task,) = read_tasks(path)
    assert (task.id, task.answers, task.metric) == ("5a8b", ("Seine",), "hotpot_f1")
    assert task.context.startswith("Document 1:\nÎle\nAn island. In the river.\n\nDocument 2:\nRome\n")
    places = [(item["document"], item["title"], item["start"], item["end"]) for item in task.extra["evidence"]]
    assert [place[:2] for place in places] == [(1, "Île"), (3, "Paris")]
    assert [task.context[place[2] : place[3]] for place in places] == [
        "Île\nAn island. In the river.",
        "Paris\nOn the Seine.",
    ]
    assert task.extra["supporting_facts"] == HOTPOT["supporting_facts"]


@pytest.mark.parametrize("indent", [None, 2])
def test_squads_original_json_is_read(tmp_path, indent):
    qas = [
        {"id": "q1", "question": "Where?", "answers": [{"text": "Paris"}, {"text": "Paris"}, {"text": "in Paris"}]},
        {"id": "q2", "question": "Who?", "answers": [], "is_impossible": True},
    ]
    data = {"version": "v2.0", "data": [{"title": "Paris", "paragraphs": [{"context": "In Paris.", "qas": qas}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(data, indent=indent))
    (task,) = read_tasks(tmp_path / "dev.json")
    assert (task.id, task.context, task.answers, task.metric) == ("q1", "In Paris.", ("Paris", "in Paris"), "f1")


BAD = [
    ({**OWN, "answers": []}, "task '1' has no answers"),
    ({**OWN, "answers": ["Seine", " "]}, "has the answer ' '"),
    ({**OWN, "answers": "Seine"}, "must be a list of strings, got 'Seine'"),
    ({**OWN, "answers": [7]}, "has the answer 7"),
    ({**OWN, "id": 1}, "the id must be a text, got 1"),
    ({**OWN, "question": ""}, "the question must be a text"),
    ({**OWN, "context": 7}, "the context must not be of type int"),
    ({**OWN, "context": {"url": "x"}}, "not {'url': 'x'}"),
    ({**OWN, "extra": [1]}, "the extra must not be of type list"),
    ({**OWN, "anwsers": ["Seine"]}, "no field 'anwsers'; did you mean 'answers'"),
    ({key: OWN[key] for key in ("id", "question", "context")}, "the field 'answers' is missing"),
    ({**OWN, "id": "0"}, r"'0' was used before, by .*tasks.jsonl, line 1"),
    ({**HOTPOT, "context": [["Rome"]]}, "line 3"),
    ({**HOTPOT, "context": 7}, "not laid out as its format wants"),
    ({"input": "Where?", "outputs": ["x"]}, "holds no context"),
    ([1], "must be a JSON object"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_malformed_task_is_refused_with_its_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "tasks.jsonl", {**OWN, "id": "0"}, {**OWN, "id": "00"}, row)
    with pytest.raises(ValueError, match=message) as refusal:
        list(read_tasks(path))
    assert f"{path}, line 3: " in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "1", "question"\n', "line 1: not valid JSON"),
        (json.dumps(OWN).encode() + b"\n{oops}\n", "line 2: not valid JSON"),
        (b"[" + json.dumps(HOTPOT).encode() + b", {oops}]", "element 2: not valid JSON"),
        (b"[" + json.dumps(HOTPOT).encode(), "element 2: .* end of the file"),
        (b"[" + json.dumps(HOTPOT).encode()[:-40], "element 1: not valid JSON"),
        (b"[1, 2]", "element 1: expected a JSON object, got '1"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b'{"id": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        list(read_tasks(path))


def test_a_gzip_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(OWN).encode() * 100)[:-20])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        list(read_tasks(path))


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), lambda v: st.lists(v, max_size=3)
)


@settings(deadline=None)  # another process may hold the processor
@given(st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5), st.booleans(), st.integers(1, 40))
def test_an_array_read_in_pieces_is_the_array(tmp_path_factory, rows, escaped, size):
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=escaped), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_READ", size)
        assert [row for _, row in json_rows.read_rows(path)] == rows


def test_a_task_over_a_corpus_never_holds_its_text(tmp_path):
    size = 5_000_000  # characters
    write_corpus(tmp_path / "corpus.jsonl", ("word " * 200 for _ in range(size // 1000)))
    row = {"context": list(range(size // 1000)), "input": "Which?", "answers": ["x"]}
    path = write(tmp_path / "eval.json", [row])
    tracemalloc.start()
    (task,) = read_tasks(path, corpus=tmp_path / "corpus.jsonl")
    read = sum(len(piece) for piece in task.context.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read > size
    assert peak < size / 10


def test_a_corpus_refuses_what_it_does_not_have(tmp_path):
    write(tmp_path / "corpus.jsonl", {"text": "a"}, {"txt": "b"})
    corpus = Corpus(tmp_path / "corpus.jsonl")
    assert (len(corpus), corpus[0]) == (2, "a")
    with pytest.raises(ValueError, match=r"corpus.jsonl, line 2: expected"):
        corpus[1]
    with pytest.raises(ValueError, match="has documents 0 to 1, not 2"):
        Documents(corpus, (0, 2))
    corpus.close()
    with pytest.raises(ValueError, match=r"other.json, element 1: .*HotpotQA"):
        Corpus(write(tmp_path / "other.json", [{"a": 1}]))
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ValueError, match="holds no documents"):
        Corpus(tmp_path / "none.jsonl")


def test_a_packed_corpus_is_the_corpus(tmp_path):
    write_corpus(tmp_path / "plain.jsonl", ["a", "b\n", "北"])
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress((tmp_path / "plain.jsonl").read_bytes()))
    plain, packed = Corpus(tmp_path / "plain.jsonl"), Corpus(tmp_path / "packed.jsonl.gz")
    assert [packed[i] for i in range(3)] == [plain[i] for i in range(3)] == ["a", "b\n", "北"]
    plain.close()
    packed.close()


def test_a_line_of_gsm8k_is_a_task(tmp_path):
    row = {"question": "How many?", "answer": "She has 1,000 + 34 = <<1000+34=1034>>1,034.\n#### 1,034"}
    first, second = read_tasks(write(tmp_path / "test.jsonl", row, row | {"answer": "#### -3", "level": 2}))
    assert first == Task(
        "0", "How many?", "", ("1034",), "number", extra={"solution": "She has 1,000 + 34 = <<1000+34=1034>>1,034."}
    )
    assert (second.id, second.answers, second.extra["level"]) == ("1", ("-3",), 2)


@pytest.mark.parametrize("answer", ["72", "It is 72. ####", "#### "])
def test_a_line_of_gsm8k_without_a_number_is_refused(tmp_path, answer):
    with pytest.raises(ValueError, match=r"test.jsonl, line 1: the answer .* has nothing after ####"):
        list(read_tasks(write(tmp_path / "test.jsonl", {"question": "q", "answer": answer})))
