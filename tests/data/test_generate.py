import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memjax.data.__main__ import app
from memjax.data.ruler import ANSWER_TOKENS
from memjax.data.tasks import read_tasks
from memjax.tokenizer import Tokenizer
from tests.data.multihop_data import HOTPOTQA, SQUAD
from tests.tiny_model import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def make_ruler(tokenizer, out, workers):
    files = ("--squad", SQUAD, "--hotpotqa", HOTPOTQA)
    arguments = ("--tokenizer", tokenizer, "--length", "8k", "--samples", 1, "--workers", workers, *files)
    return run("ruler", "--out", out, *arguments)


def test_the_bytes_of_all_ruler_tasks_do_not_depend_on_the_workers(tokenizer, tmp_path):
    count = Tokenizer.load(tokenizer).count
    contents = []
    for workers in (1, 2):
        out = tmp_path / str(workers) / "ruler.jsonl"
        out.parent.mkdir()
        result = make_ruler(tokenizer, out, workers)
        assert result.exit_code == 0, result.output
        contents.append(out.read_bytes())
        assert sorted(path.name for path in out.parent.iterdir()) == [
            "ruler.jsonl",
            "ruler.qa_1.documents.jsonl",
            "ruler.qa_2.documents.jsonl",
        ]
    assert contents[0] == contents[1]
    assert "niah_multikey_3" in result.stdout
    tasks = list(read_tasks(out))
    assert len(tasks) == 13
    for task in tasks:
        context = task.context if isinstance(task.context, str) else "".join(task.context.pieces())
        assert count(context) == task.extra["context_tokens"]
        assert task.extra["length"] <= 8192


def test_long_multihop_contexts_are_tasks_over_a_corpus(tokenizer, tmp_path):
    out = tmp_path / "hotpotqa.jsonl"
    result = run(
        "hotpotqa", HOTPOTQA, "--out", out, "--tokenizer", tokenizer, "--length", "7k", "--samples", 9, "--workers", 2
    )
    assert result.exit_code == 0, result.output
    tasks = list(read_tasks(out))
    assert len({task.id for task in tasks}) == len({task.extra["seed"] for task in tasks}) == 9
    for task in tasks:
        assert 7168 - 71 <= task.extra["length"] <= 7168
    assert json.loads(out.read_text().splitlines()[0])["context"]["corpus"] == "hotpotqa.documents.jsonl"


def test_contexts_of_a_split_use_the_paragraphs_of_that_split_only(tokenizer, tmp_path):
    texts = {}
    for split, samples in (("train", 10), ("eval", 8)):
        out = tmp_path / f"{split}.jsonl"
        options = ("--docs", 40, "--split", split, "--eval-count", 8, "--samples", samples, "--workers", 1)
        result = run("hotpotqa", HOTPOTQA, "--out", out, "--tokenizer", tokenizer, *options)
        assert result.exit_code == 0, result.output
        documents = out.with_name(f"{split}.documents.jsonl").read_text().splitlines()
        texts[split] = {json.loads(line)["text"].partition("\n")[2] for line in documents}
    assert not texts["train"] & texts["eval"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ruler", "--length", "4k", "--tasks", "qa_1"), "qa_1 asks questions of a squad file: give --squad FILE"),
        (("ruler", "--length", "4k", "--tasks", "vt2"), "unknown RULER task 'vt2'"),
        (("ruler", "--length", "4x", "--tasks", "vt"), "a length is a number of tokens"),
        (("ruler", "--length", "4k", "--tasks", "niah_single_2", "--haystack", "missing.txt"), "missing.txt"),
        (("hotpotqa", HOTPOTQA, "--docs", 50, "--samples", 41), "41 samples were asked for"),
        (("hotpotqa", HOTPOTQA), "give --length or --docs"),
        (
            ("hotpotqa", HOTPOTQA, "--docs", 9, "--split", "eval", "--eval-count", 9, "--distractors", HOTPOTQA),
            "split or add",
        ),
    ],
)
def test_what_cannot_be_made_leaves_a_message_and_no_file(tokenizer, tmp_path, arguments, message):
    out = tmp_path / "out.jsonl"
    result = run(*arguments, "--out", out, "--tokenizer", tokenizer, "--workers", 1)
    assert result.exit_code == 2
    assert result.stderr.startswith("memjax: ")  # nothing of a progress bar above it
    assert message in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob("*.part*"))


def test_all_tasks_are_those_whose_data_was_given(tokenizer, tmp_path):
    arguments = ("--tokenizer", tokenizer, "--length", "4k", "--samples", 1, "--workers", 1, "--hotpotqa", HOTPOTQA)
    result = run("ruler", "--out", tmp_path / "out.jsonl", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("qa_1 is left out: --squad FILE brings it\n")
    made = {task.extra["task"] for task in read_tasks(tmp_path / "out.jsonl")}
    assert made == set(ANSWER_TOKENS) - {"qa_1"}


def test_a_task_file_is_replaced_only_with_force(tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    arguments = ("--tokenizer", tokenizer, "--length", "1k", "--tasks", "vt", "--samples", 1, "--workers", 1)
    refused = run("ruler", "--out", out, *arguments)
    assert refused.exit_code == 2
    assert refused.stderr == f"memjax: {out} exists: give another --out, or --force to replace it\n"
    assert out.read_text() == "precious"
    assert run("ruler", "--out", out, *arguments, "--force").exit_code == 0
    assert len(list(read_tasks(out))) == 1


def test_of_a_replaced_task_file_nothing_stays(tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    out.with_name("out.contexts").mkdir()
    for name in ("out.jsonl", "out.contexts/vt-1-0.txt", "out.qa_2.documents.jsonl", "other.documents.jsonl"):
        (tmp_path / name).write_text("of an earlier run")
    arguments = ("--out", out, "--tokenizer", tokenizer, "--tasks", "vt", "--samples", 1, "--workers", 1, "--force")
    assert run("ruler", *arguments, "--length", "300k").exit_code == 0
    assert [path.name for path in (tmp_path / "out.contexts").iterdir()] == ["vt-307200-0.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.documents.jsonl", "out.contexts", "out.jsonl"]
    assert run("ruler", *arguments, "--length", "1k").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.documents.jsonl", "out.jsonl"]


def test_a_tokenizer_that_is_not_there_is_bad_input(tmp_path):
    result = run("ruler", "--out", tmp_path / "o", "--tokenizer", tmp_path / "no", "--length", "1k", "--tasks", "vt")
    assert result.exit_code == 2
    assert result.stderr.startswith("memjax: ")


@pytest.mark.parametrize("command", ["ruler", "hotpotqa"])
def test_help_has_examples(command):
    result = run(command, "-h")
    assert result.exit_code == 0
    assert f"memjax data {command} " in result.output


def test_workers_end_when_the_run_is_killed(tokenizer, tmp_path):
    arguments = ("--tokenizer", tokenizer, "--length", "4m", "--tasks", "niah_single_1", "--workers", "2")
    command = [sys.executable, "-m", "memjax.data", "ruler", "--out", tmp_path / "out.jsonl", *arguments]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    started = await_true(lambda: [pid for pid in children.read_text().split() if is_worker(pid)])
    run.kill()
    run.wait()
    assert await_true(lambda: not any(map(is_worker, started)))


def await_true(condition):
    end = time.monotonic() + 60
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


def is_worker(pid):
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
