import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memjax.data.tasks import write_tasks
from memjax.eval.__main__ import app
from memjax.eval.config import EvalConfig, load_config
from memjax.eval.tasks import TaskMaker
from memjax.rollout.fake import ByteTokenizer, NeedleReader
from memjax.trajectory import Task
from tests.eval.forgetful import PATTERN, fact_task
from tests.eval.stub_service import serving

HOTPOTQA = Path(__file__).parents[1] / "data" / "multihop" / "hotpotqa_40.json.gz"
CONFIGS = Path(__file__).parents[2] / "configs" / "eval"
TINY = Path(__file__).parents[2] / "memjax" / "assets" / "tiny"
BUDGETS = ["--question-tokens", "64", "--chunk-tokens", "96", "--memory-tokens", "128", "--answer-tokens", "64"]


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [fact_task(number, chunks=6) for number in range(12)])
    return file


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def of_file(tasks, url, out):
    return ["file", "--data", f"tasks={tasks}", "--url", url, "--out", out, *BUDGETS]


def results_without_commit(out):
    """The file's text but for the commit, which may change while this test runs on somebody's checkout."""
    return [line for line in (out / "results.json").read_text().splitlines() if "git_hash" not in line]


def kill(command, when):
    """Start the command, and end it with SIGKILL once `when` holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memjax.eval", *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not when() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def lines_of(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_killed_in_the_middle_and_resumed_gives_the_results_of_an_uninterrupted_one(tmp_path, tasks):
    with serving(NeedleReader(PATTERN, forget=0.2), seconds=0.02) as service:
        whole = invoke(*of_file(tasks, service.url, tmp_path / "whole"))
        assert whole.exit_code == 0, whole.output
        calls = len(service.prompts)

        killed = [*of_file(tasks, service.url, tmp_path / "killed"), "--concurrency", 2]
        samples = tmp_path / "killed" / "samples_file.jsonl"
        kill(killed, lambda: lines_of(samples) >= 4)
        assert 4 <= lines_of(samples) < 12
        assert not (tmp_path / "killed" / "results.json").exists()

        resumed = invoke(*of_file(tasks, service.url, tmp_path / "killed"))
        assert resumed.exit_code == 0, resumed.output
        # Neither a finished sample nor a finished call of another one is asked again; two calls were under way.
        assert calls <= len(service.prompts) - calls <= calls + 2
    assert results_without_commit(tmp_path / "killed") == results_without_commit(tmp_path / "whole")
    assert 0 < json.loads((tmp_path / "whole" / "results.json").read_text())["results"]["file"]["score"] < 1


def test_a_run_killed_again_and_again_inside_its_samples_makes_no_finished_call_twice(tmp_path, tasks):
    settings = ["--samples", 3, "--concurrency", 1, "--chunk-tokens", 32]
    with serving(NeedleReader(PATTERN, forget=0.2), seconds=0.05) as service:
        assert invoke(*of_file(tasks, service.url, tmp_path / "whole"), *settings).exit_code == 0
        calls = len(service.prompts)
        assert calls >= 3 * 8
        command = [*of_file(tasks, service.url, tmp_path / "out"), *settings]
        for _ in range(3):
            before = len(service.prompts)
            kill(command, lambda before=before: len(service.prompts) >= before + 6)
            assert len(list((tmp_path / "out" / "journals").iterdir())) == 1
        resumed = invoke(*command)
        assert resumed.exit_code == 0, resumed.output
        assert f"of {calls // 3} calls were replayed" in resumed.stderr
        assert calls <= len(service.prompts) - calls <= calls + 3  # at each kill one call was under way
    assert results_without_commit(tmp_path / "out") == results_without_commit(tmp_path / "whole")
    assert list((tmp_path / "out" / "journals").iterdir()) == []


def test_failed_samples_are_shown_counted_and_retried_by_the_same_command(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        service.status = lambda call: 400 if call < 3 else 200
        first = invoke(*of_file(tasks, service.url, tmp_path / "out"), "--concurrency", 1)
        assert first.exit_code == 0
        assert "3 of 12 samples failed and count as wrong" in first.output
        assert json.loads((tmp_path / "out" / "results.json").read_text())["results"]["file"]["score"] == 0.75
        second = invoke(*of_file(tasks, service.url, tmp_path / "out"))
        assert "failed and count" not in second.output
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"]["file"]["score"] == 1


def test_a_run_without_a_single_answer_ends_with_failure(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        service.status = lambda call: 401
        result = invoke(*of_file(tasks, service.url, tmp_path / "out"))
    assert result.exit_code == 1
    assert "12 of 12 samples failed" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("agent", ["memagent", "single", "single-truncated", "no-context", "oracle"])
def test_every_agent_runs_a_generated_suite(tmp_path, agent):
    lengths = ["--lengths", "1k", "--samples", "2", "--window", "700" if agent == "single-truncated" else "4000"]
    with serving(NeedleReader(r"A secret number for (?:\S+) is (\d+)\.")) as service:
        budgets = ["--question-tokens", "64", "--answer-tokens", "64"]
        budgets += ["--chunk-tokens", "256", "--memory-tokens", "64"] if agent == "memagent" else []
        out = tmp_path / "out"
        which = ["ruler", "--tasks", "niah_single_1", "--agent", agent, "--url", service.url, "--out", out]
        result = invoke(*which, *lengths, *budgets)
    assert result.exit_code == 0, result.output
    cell = json.loads((out / "results.json").read_text())["results"]["niah_single_1_1k"]
    assert cell["failed"] == 0
    if agent == "memagent":
        assert (cell["score"], cell["memory/capture_rate"], cell["memory/retention_rate"]) == (1.0, 1.0, 1.0)
    asked = service.prompts[0]
    assert ("secret number for" in asked.replace("Which secret", "")) == (agent in ("single", "oracle")) or agent in (
        "memagent",
        "single-truncated",
    )
    assert (cell["dropped_tokens"] > 0) == (agent == "single-truncated")


def test_a_config_file_runs_and_options_go_over_it(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        file = tmp_path / "eval.yaml"
        file.write_text(
            f"suite: file\ndata: {{tasks: {tasks}}}\nurl: {service.url}\nout: {tmp_path / 'out'}\nsamples: 5\n"
            "agent: {chunk: 96, memory: 128}\n"
        )
        result = invoke("--config", file, "--samples", 3, "--memory-tokens", 130)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["samples"] == 3
    assert [config[f"agent.{name}"] for name in ("name", "chunk", "memory", "answer")] == ["memagent", 96, 130, 1024]


@pytest.mark.parametrize(
    ("in_file", "options", "agent"),
    [
        ("single", {"answer_tokens": 9}, {"name": "single", "answer": 9, "question": 128}),
        ("single", {"agent": "memagent"}, {"name": "memagent", "chunk": 512, "answer": 64}),
        ("{name: single, answer: 9}", {"agent": "oracle"}, {"name": "oracle", "answer": 9}),
        ("{chunk: 99}", {"layout": "chunk_first"}, {"name": "memagent", "chunk": 99, "layout": "chunk_first"}),
    ],
)
def test_options_go_over_the_agent_of_a_config_file(tmp_path, in_file, options, agent):
    (tmp_path / "c.yaml").write_text(f"suite: smoke\nout: o\nagent: {in_file}\n")
    loaded = load_config(tmp_path / "c.yaml", options).suited_agent.model_dump()
    assert {name: loaded[name] for name in agent} == agent


def test_a_file_with_fewer_tasks_than_samples_is_read_whole_and_that_is_said(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        result = invoke(*of_file(tasks, service.url, tmp_path / "out"), "--samples", 99)
    assert result.exit_code == 0
    assert "file has 12 tasks, fewer than the 99 asked for: all were read" in result.output


def test_a_directory_made_with_other_budgets_is_refused(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        invoke(*of_file(tasks, service.url, tmp_path / "out"), "--samples", 1)
        result = invoke(*of_file(tasks, service.url, tmp_path / "out"), "--samples", 1, "--chunk-tokens", "50")
    assert result.exit_code == 2
    assert "made with another config (agent.chunk was 96, is 50)" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smoky", "--out", "o"], "there is no suite 'smoky'; did you mean smoke?"),
        (["smoke"], "no results directory was named: give --out DIR"),
        (["smoky"], "there is no suite 'smoky'"),
        (["--out", "o"], "no suite was named"),
        (["smoke", "--out", "o", "--tasks", "vt,cwe"], "smoke has no task 'cwe'"),
        (["ruler-hotpotqa", "--out", "o"], "ruler-hotpotqa needs a file: give --data hotpotqa=PATH"),
        (["ruler-hotpotqa", "--out", "o", "--data", "dev.json"], "such as hotpotqa=dev.json, got"),
        (["file", "--out", "o", "--data", "r.jsonl"], "such as tasks=r.jsonl, got 'r.jsonl'"),
        (["ruler", "--out", "o", "--data", "squat=x"], "ruler has no use for data 'squat'; it takes squad, hotpotqa"),
        (["hotpotqa", "--out", "o", "--data", "hotpotqa=x", "--lengths", "7k"], "leave --lengths out"),
        (["smoke", "--out", "o", "--samples", "0"], "--samples: Input should be greater than or equal to 1, got 0"),
        (["smoke", "--out", "o", "--chunk-tokens", "0"], "--chunk-tokens: Input should be greater than or equal to 16"),
        (["smoke", "--out", "o", "--agent", "reader"], "there is no agent 'reader': choose one of memagent, single,"),
        (["smoke", "--out", "o", "--agent", "single", "--layout", "chunk_first"], "--layout: the agent single has no"),
        (["smoke", "--out", "o", "--agent", "oracle", "--memory-tokens", "9"], "--memory-tokens: the agent oracle has"),
        (
            ["smoke", "--out", "o", "--layout", "upside_down"],
            "--layout: Input should be 'memory_first' or 'chunk_first'",
        ),
        (["--config", "nowhere.yaml"], "there is no config file nowhere.yaml"),
        (["smoke", "--out", "o"], "no model given: --model takes"),
        (["ruler", "--out", "o", "--tasks", "qa_1"], "qa_1 asks the questions of squad: give --data squad=PATH"),
        (["file", "--out", "o", "--data", "tasks=r.jsonl"], "there is no file r.jsonl, which --data tasks=PATH names"),
        (["file", "--out", "o", "--data", "tasks=."], "there is no file ., which --data tasks=PATH names"),
        (["report", "nowhere"], "nowhere has no config.json"),
        (["smoke", "--out", "o", "--model", str(TINY)], "tokens, but the window of"),
        (["smoke", "--out", "o", "--model", "."], "no config.json in .; is it a model directory?"),
    ],
)
def test_bad_usage_ends_with_one_sentence_and_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("URL", raising=False)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("memjax: ")  # nothing of a progress bar above it
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("lengths", "message"), [("7x", "such as 8192, 7k or 3.5m, got '7x'"), ("9m", "add files with distractors")]
)
def test_lengths_that_cannot_be_had_are_refused(tmp_path, lengths, message):
    with serving(NeedleReader(PATTERN)) as service:
        data = ["--data", f"hotpotqa={HOTPOTQA}", "--samples", 1]
        result = invoke("ruler-hotpotqa", *data, "--lengths", lengths, "--url", service.url, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.output


def test_an_unknown_key_of_a_config_file_names_the_nearest(tmp_path):
    (tmp_path / "c.yaml").write_text("suite: smoke\nout: o\nagent: {chunks: 5}\n")
    result = invoke("--config", tmp_path / "c.yaml")
    assert "unknown config key agent.chunks " in result.output
    assert "did you mean agent.chunk?" in result.output


def test_a_file_where_results_should_go_is_refused(tmp_path, tasks):
    with serving(NeedleReader(PATTERN)) as service:
        result = invoke(*of_file(tasks, service.url, tasks))
    assert (result.exit_code, "is a file, and results are a directory" in result.stderr) == (2, True)


def test_a_malformed_task_line_is_named(tmp_path, tasks):
    with tasks.open("a") as file:
        file.write('{"id": "x"\n')
    with serving(NeedleReader(PATTERN)) as service:
        result = invoke(*of_file(tasks, service.url, tmp_path / "out"))
    assert result.exit_code == 2
    assert "tasks.jsonl, line 13" in result.output


def test_a_file_measured_with_another_tokenizer_is_refused(tmp_path):
    rows = [{"id": "a", "question": "q", "context": "c" * 90, "answers": ["x"], "extra": {"context_tokens": 30}}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(suite="file", out=tmp_path / "out", data={"tasks": tmp_path / "t.jsonl"})
    with pytest.raises(ValueError, match="has 30 tokens, but this model's tokenizer counts 90"):
        list(TaskMaker(config, ByteTokenizer(), tmp_path).jobs())


def test_hotpotqa_and_longbench_files_run(tmp_path):
    row = {"_id": "1", "input": "Which?", "context": "text", "answers": ["a", "b"], "length": 1, "dataset": "qasper"}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    with serving(lambda prompt, params: r"\boxed{b}") as service:
        where = ["--url", service.url, "--agent", "single", "--window", "20000"]
        long = ["longbench-qa", "--tasks", "qasper", "--data", f"longbench={tmp_path}"]
        assert invoke(*long, *where, "--out", tmp_path / "long").exit_code == 0
        hot = ["hotpotqa", "--data", f"hotpotqa={HOTPOTQA}", "--samples", 3]
        assert invoke(*hot, *where, "--out", tmp_path / "hot").exit_code == 0
    results = json.loads((tmp_path / "long" / "results.json").read_text())["results"]["qasper"]
    assert results["score"] == results["longbench_f1,none"] == 1
    golds = {row["_id"]: row["answer"] for row in json.loads(gzip.decompress(HOTPOTQA.read_bytes()))}
    lines = [json.loads(line) for line in (tmp_path / "hot" / "samples_hotpotqa.jsonl").read_text().splitlines()]
    assert all(line["target"] == [golds[line["id"]]] and line["metric"] == "hotpot_f1" for line in lines)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_file_loads_and_starts_with_its_command(file):
    first = file.read_text().splitlines()[0]
    assert first.startswith(f"# python -m memjax.eval --config configs/eval/{file.name}")
    assert load_config(file, {"out": "runs/x"}).chosen


def test_smoke_says_whether_everything_worked_however_low_the_score(tmp_path):
    with serving(lambda prompt, params: "no idea") as service:
        works = invoke("smoke", "--url", service.url, "--samples", 1, "--out", tmp_path / "works")
        service.status = lambda call: 401
        fails = invoke("smoke", "--url", service.url, "--samples", 1, "--out", tmp_path / "fails")
    assert works.exit_code == 0
    assert works.stderr.splitlines()[-1] == "everything works: all 2 samples were answered, well or badly"
    assert max(map(len, works.stdout.splitlines())) <= 100
    assert fails.stderr.splitlines()[-1].startswith("not everything works: 2 of 2 samples failed")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_the_suites(option):
    result = invoke(option)
    assert result.exit_code == 0
    for name in ("ruler-hotpotqa", "longbench-qa", "smoke", "report"):
        assert name in result.output


def test_a_metric_that_cannot_be_used_is_refused_before_a_model_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def nothing(prediction, answers):\n    return None\n")
    for metric, message in (("mine.py:nothing", "gave None"), ("mine:nothin", "did you mean nothing?")):
        write_tasks("tasks.jsonl", [Task("a", "?", "text", ("b",), metric)])
        done = invoke("file", "--data", "tasks=tasks.jsonl", "--model", "absent", "--out", "out")
        assert (done.exit_code, message in done.output) == (2, True), done.output


@pytest.mark.parametrize("silence", ["", "<think>I go on and on"])
def test_replies_that_say_nothing_are_counted_and_smoke_does_not_call_them_working(tmp_path, silence):
    with serving(lambda prompt, params: silence if "section" in prompt else "\\boxed{7}") as service:
        ended = invoke("smoke", "--url", service.url, "--out", tmp_path / "silent")
    assert ended.exit_code == 1, ended.output
    assert "not everything works: 16 of 24 replies said nothing" in ended.stderr
    assert "everything works: all" not in ended.stderr
    with serving(lambda prompt, params: "\\boxed{7}") as service:
        works = invoke("smoke", "--url", service.url, "--out", tmp_path / "says")
    assert (works.exit_code, "everything works: all 8" in works.stderr) == (0, True)


def test_halves_of_characters_in_a_task_file_are_read_as_text(tmp_path):
    row = {
        "id": "a",
        "question": "Who \ud83d kept?",
        "context": "The \ud83d key.",
        "answers": ["a \ud83d"],
        "metric": "em",
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    with serving(lambda prompt, params: "\\boxed{a \ufffd}") as service:
        ended = invoke(*of_file(tmp_path / "tasks.jsonl", service.url, tmp_path / "out"))
    assert ended.exit_code == 0, ended.output
    assert "Who \ufffd kept?" in service.prompts[0]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"]["file"]["score"] == 1
