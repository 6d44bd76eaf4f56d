"""`memjax ask` from the command line: answers, refusals, and readings that go on after any interruption."""

import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from memjax.ask import load_state
from memjax.ask_display import AskDisplay
from memjax.cli import app
from memjax.rollout.fake import NeedleReader
from tests.eval.stub_service import serving

FILLER = "The wind blew from the west and nobody minded it. " * 40  # 2000 bytes, some 450 estimated tokens
TEXT = FILLER + "The code is 4711. " + FILLER + "The gate is green. " + FILLER
BUDGETS = ["--chunk-tokens", "300", "--memory-tokens", "200", "--answer-tokens", "100"]


@pytest.fixture
def document(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("URL", raising=False)
    monkeypatch.delenv("API_KEY", raising=False)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def ask(service, *arguments, stdin=None):
    return run("ask", *arguments, "--url", service.url, "--model", "stub", *BUDGETS, stdin=stdin)


CODE = NeedleReader(r"code is (\d+)")


def test_the_answer_alone_goes_to_standard_output(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "4711\n"
    assert "chunk 1 of about" in result.stderr
    first = next(line for line in result.stderr.splitlines() if line.startswith("chunk 1 of about"))
    assert "tokens/s" not in first
    assert "left" not in first
    assert re.search(r"^chunk 2 of .*tokens/s, .* left$", result.stderr, re.MULTILINE)
    assert re.search(r"^\d+ document tokens in \d chunks, .* s, \d+ tokens/s\.$", result.stderr, re.MULTILINE)


def test_without_a_terminal_a_line_says_what_is_waited_for():
    err = io.StringIO()
    display = AskDisplay(Console(file=err), chunk_tokens=9, show_memory=False, compiles=True)
    with display.waiting("loading m"):
        assert err.getvalue() == "loading m\n"
    with display.reading():
        assert err.getvalue() == "loading m\nreading; the first chunk also compiles\n"


def test_json_is_one_object_with_answer_memory_counts_and_settings(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document, "--json", "--show-memory")
    outcome = json.loads(result.stdout)
    (answer,) = outcome["answers"]
    assert answer["question"] == "What is the code?"
    assert (answer["answer"], answer["reply"], answer["memory"]) == ("4711", "\\boxed{4711}", "- 4711")
    assert outcome["counters"]["model_calls"] == outcome["chunks"] + 1 > 4
    assert outcome["settings"]["chunk_tokens"] == 300
    assert len(outcome["identity"]["prompts"]) == 16
    assert "memory after chunk 1" in result.stderr


@pytest.mark.parametrize("layout", ["memory_first", "chunk_first"])
def test_several_questions_are_answered_in_order_from_one_reading(document, layout):
    def reply(prompt, params):
        about = (
            r"gate is (\w+)" if "gate" in prompt.split("<question>")[1].split("</question>")[0] else r"code is (\d+)"
        )
        return NeedleReader(about)(prompt, params)

    with serving(reply) as service:
        result = ask(service, "-q", "What is the code?", "-q", "Which gate?", document, "--layout", layout, "--json")
    outcome = json.loads(result.stdout)
    assert [(a["question"], a["answer"]) for a in outcome["answers"]] == [
        ("What is the code?", "4711"),
        ("Which gate?", "green"),
    ]
    assert outcome["counters"]["model_calls"] == 2 * (outcome["chunks"] + 1)


def test_standard_input_is_read(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", "-", stdin=TEXT)
    assert result.stdout == "4711\n"


def test_the_single_agent_says_that_it_has_no_memory_to_show(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document, "--agent", "single", "--show-memory")
    assert "--agent single has no memory" in result.stderr
    assert "document tokens in one piece" in result.stderr


def test_the_trace_holds_every_prompt_and_reply(document, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with serving(CODE) as service:
        ask(service, "What is the code?", document, "--trace", trace)
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [record["prompt"][0]["content"] for record in records] == service.prompts
    sections = [prompt.split("<section>\n")[1].split("\n</section>")[0] for prompt in service.prompts[:-1]]
    assert "".join(sections) == TEXT
    assert [record["kind"] for record in records[-2:]] == ["memory", "final"]
    assert records[-1]["reply"] == "\\boxed{4711}"


def test_the_single_agent_reads_at_once_and_refuses_what_does_not_fit(document):
    with serving(lambda prompt, params: "\\boxed{4711}" if TEXT in prompt else "?") as service:
        assert ask(service, "What is the code?", document, "--agent", "single").stdout == "4711\n"
    with serving(CODE, window=1000) as service:
        result = ask(service, "What is the code?", document, "--agent", "single")
    assert result.exit_code == 2
    assert "the window of stub (1000) holds" in result.stderr


def test_default_budgets_shrink_to_a_small_window_and_chosen_ones_are_refused(document):
    with serving(CODE, window=2048) as service:
        result = run("ask", "What is the code?", document, "--url", service.url, "--json")
        assert result.exit_code == 0, result.stderr
        chosen = run("ask", "What is the code?", document, "--url", service.url, "--chunk-tokens", 3000)
    settings = json.loads(result.stdout)["settings"]
    assert settings["memory_tokens"] == settings["answer_tokens"] == 256
    assert 1000 < settings["chunk_tokens"] < 2048
    assert settings["model"] == "stub"  # the only model that the service lists
    assert chosen.exit_code == 2
    assert "chunk 3000 + memory 256 +" in chosen.stderr
    assert "the window of stub holds 2048: lower the chunk budget to" in chosen.stderr


def test_a_prompt_directory_is_used(document, tmp_path):
    (tmp_path / "memory.txt").write_text("<section>\n{chunk}\n</section>{question}<memory>\n{memory}\n</memory>MINE")
    (tmp_path / "final.txt").write_text("{question}<memory>\n{memory}\n</memory>MINE")
    (tmp_path / "no_memory.txt").write_text("void")
    with serving(CODE) as service:
        assert ask(service, "What is the code?", document, "--prompts", tmp_path).stdout == "4711\n"
    assert all(prompt.endswith("MINE") for prompt in service.prompts)


def chained(prompt, params):
    """A reply that depends on every word of the prompt and on the seed: any slip in resuming shows in the end."""
    return hashlib.sha256(f"{params.seed} {prompt}".encode()).hexdigest()


@dataclasses.dataclass
class Breaking:
    """Replies like `chained`, and fails for good at one call."""

    at: int
    calls: int = 0

    def __call__(self, prompt, params):
        self.calls += 1
        return chained(prompt, params)

    def status(self, call):
        return 400 if call == self.at else 200


def test_a_failure_before_the_first_chunk_leaves_nothing_to_resume(document, tmp_path):
    state = tmp_path / "state.json"
    with serving(chained) as service:
        service.status = Breaking(0).status
        broken = ask(service, "What?", "-", "--state", state, stdin=TEXT)
    assert broken.exit_code == 1
    assert "--resume" not in broken.stderr
    assert not list(tmp_path.glob("state.json*"))


@pytest.mark.parametrize("at", [1, 4])
def test_a_failed_reading_resumes_to_the_same_end(document, tmp_path, at):
    state, trace = tmp_path / "state.json", tmp_path / "trace.jsonl"
    with serving(chained) as service:
        straight = json.loads(ask(service, "What?", document, "--json", "--temperature", "0.8").stdout)
    with serving(Breaking(at)) as service:
        service.status = Breaking(at).status
        broken = ask(service, "What?", document, "--temperature", "0.8", "--state", state, "--trace", trace)
    assert broken.exit_code == 1
    *_, error, hint = broken.stderr.splitlines()
    assert "HTTP 400" in error
    assert hint.endswith(f"memjax ask --resume {state}")
    assert "Traceback" not in broken.stderr
    assert load_state(state).chunks_read == at
    with serving(chained) as service:
        resumed = run("ask", "--resume", state, "--url", service.url, "--json", "--trace", trace)
    assert resumed.exit_code == 0, resumed.stderr
    outcome = json.loads(resumed.stdout)
    assert outcome["answers"] == straight["answers"]
    assert outcome["counters"] == straight["counters"]
    assert outcome["document_tokens"] == straight["document_tokens"]
    assert len(service.prompts) == straight["chunks"] - at + 1
    assert len(trace.read_text().splitlines()) == straight["chunks"] + 1


def test_a_finished_reading_is_printed_again_without_a_model(document, tmp_path):
    state = tmp_path / "state.json"
    with serving(CODE) as service:
        ask(service, "What is the code?", document, "--state", state)
    for _ in range(2):  # with the document, and without
        result = run("ask", "--resume", state)
        assert (result.exit_code, result.stdout) == (0, "4711\n")
        assert f"{state} is a finished reading" in result.stderr
        document.unlink(missing_ok=True)
    document.write_text(TEXT + "More.")
    assert "text.txt has changed since it was read" in run("ask", "--resume", state).stderr
    document.write_text(TEXT)
    assert "model was 'stub', is 'another'" in run("ask", "--resume", state, "--model", "another").stderr
    other = run("ask", "Something else?", "--resume", state)
    assert other.exit_code == 2
    assert "questions was ['What is the code?'], is ['Something else?']" in other.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (["--chunk-tokens", "200"], "chunk_tokens was 300, is 200"),
        (["--layout", "chunk_first"], "layout was 'memory_first', is 'chunk_first'"),
        (["--seed", "5"], "seed was 0, is 5"),
        (["--temperature", "1"], "temperature was 0.0, is 1.0"),
        (["--model", "another"], "model was 'stub', is 'another'"),
        ("document", "text.txt has changed since it was read"),
        ("prompts", "prompts was"),
    ],
)
def test_a_reading_is_resumed_only_as_it_was_begun(document, tmp_path, change, field):
    state, prompts = tmp_path / "state.json", tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "memory.txt").write_text("{chunk} {question} {memory}")
    (prompts / "final.txt").write_text("{question} {memory}")
    (prompts / "no_memory.txt").write_text("void")
    with serving(chained) as service:
        service.status = Breaking(2).status
        ask(service, "What?", document, "--state", state, "--prompts", prompts)
    if change == "document":
        document.write_text(TEXT + "More.")
    if change == "prompts":
        (prompts / "final.txt").write_text("{question} {memory}!")
    with serving(chained) as service:
        extra = change if isinstance(change, list) else []
        result = run("ask", "--resume", state, "--url", service.url, *extra)
    assert result.exit_code == 2
    assert field in result.stderr
    assert "is kept" not in result.stderr
    assert service.prompts == []
    assert load_state(state).chunks_read == 2


def test_a_piped_document_resumes_without_the_pipe(document, tmp_path):
    state = tmp_path / "state.json"
    with serving(chained) as service:
        straight = ask(service, "What?", "-", stdin=TEXT)
        service.status = Breaking(len(service.prompts) + 2).status
        ask(service, "What?", "-", "--state", state, stdin=TEXT)
    with serving(chained) as service:
        resumed = run("ask", "--resume", state, "--url", service.url, stdin="")
    assert resumed.stdout == straight.stdout
    assert [path.name for path in tmp_path.glob("state.json*")] == ["state.json"]


def _until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_reading_that_is_killed_resumes_at_the_next_chunk(document, tmp_path, blow, code):
    state = tmp_path / "state.json"
    with serving(chained) as service:
        straight = json.loads(ask(service, "What?", document, "--json").stdout)
    with serving(chained, seconds=0.2) as service:
        command = [sys.executable, "-m", "memjax.cli", "ask", "What?", str(document), "--model", "stub", *BUDGETS]
        command += ["--url", service.url, "--state", str(state)]
        heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        signal.signal(signal.SIGINT, heard)
        _until(lambda: len(service.prompts) >= 4, process)
        process.send_signal(blow)
        out, err = process.communicate()
    assert process.returncode == code
    assert out == ""
    if blow != signal.SIGKILL:
        assert f"memjax ask --resume {state}" in err
        assert "Traceback" not in err
    done = load_state(state).chunks_read
    assert 2 <= done <= 4
    with serving(chained) as service:
        resumed = json.loads(run("ask", "--resume", state, "--url", service.url, "--json").stdout)
    assert resumed["answers"] == straight["answers"]
    assert len(service.prompts) == straight["chunks"] - done + 1
