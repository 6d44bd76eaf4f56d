import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memjax.data.__main__ import app
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
        (("ruler", "--length", "4k", "--tasks", "qa_1"), "qa_1 asks questions of a squad file"),
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
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not out.exists()
    assert not list(tmp_path.glob("*.part*"))


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
