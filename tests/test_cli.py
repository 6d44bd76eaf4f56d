"""The `memjax` command teaches, and refuses in one sentence."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import memjax
from memjax.cli import app
from tests.eval.stub_service import serving


@pytest.fixture(autouse=True)
def _quiet_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("URL", raising=False)
    monkeypatch.delenv("API_KEY", raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some text.")
    return path


def test_help_needs_no_heavy_import():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom memjax.cli import app\n"
        "assert CliRunner().invoke(app, ['ask', '--help']).exit_code == 0\n"
        "heavy = {'jax', 'flax', 'transformers', 'tokenizers', 'httpx', 'pypdf', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [[], ["ask"], ["quickstart"], ["convert"]])
def test_every_command_explains_itself_with_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "memjax" in result.stdout.split("Usage:")[1].split("\n", 1)[1]


@pytest.mark.parametrize("command", ["eval", "train", "data"])
def test_commands_of_other_rooms_explain_themselves(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"memjax {command}" in result.stdout


def test_version():
    assert run("--version").stdout == f"memjax {memjax.__version__}\n"


def test_quickstart_prints_the_expected_answer_beside_the_models():
    with serving(lambda prompt, params: "noted 7093" if "7093" in prompt else "nothing") as service:
        result = run("quickstart", "--url", service.url)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "Question: What is the code of the lamp room door?",
        "Answer:   noted 7093",
        "Expected: 7093",
        "Result:   as expected",
    ]
    assert len(service.prompts) >= 4
    assert "memory after chunk 2" in result.stderr


@pytest.mark.parametrize(("reply", "shown"), [("a lamp", "a lamp"), ("", "(the reply was empty)")])
def test_quickstart_says_when_the_answer_is_another_or_none(reply, shown):
    with serving(lambda prompt, params: reply) as service:
        result = run("quickstart", "--url", service.url)
    assert f"Answer:   {shown}\n" in result.stdout
    assert "Result:   not the expected answer: a small model" in result.stdout


def test_serve_does_not_speak_of_an_option_it_lacks():
    assert "--url" not in run("serve", "--help").stdout


def test_a_reader_of_the_output_that_is_gone_ends_the_command_silently(text, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # the pipe breaks when the buffer is written
    with serving(lambda prompt, params: "x") as service:
        command = [sys.executable, "-m", "memjax.cli", "ask", "What?", str(text), "--url", service.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        said = process.stderr.read()
        process.stderr.close()
        process.wait()
    assert "roken" not in said
    assert "Traceback" not in said


BAD = {
    "no question": (["ask"], "no question given"),
    "no file": (["ask", "What?"], "no document given"),
    "no model": (["ask", "What?", "{text}"], "no model given: --model takes"),
    "absent file": (["ask", "What?", "/absent.txt", "-m", "m"], "there is no file /absent.txt"),
    "absent model": (["ask", "What?", "{text}", "-m", "/absent"], "no model at '/absent': give a directory, a .gguf"),
    "empty model directory": (
        ["ask", "What?", "{text}", "-m", "{dir}"],
        "no config.json in {dir}; is it a model directory?",
    ),
    "unknown agent": (
        ["ask", "What?", "{text}", "--agent", "reader"],
        "there is no agent 'reader': choose one of memagent, single, single-truncated, no-context, oracle",
    ),
    "tiny chunk": (
        ["ask", "W?", "{text}", "--chunk-tokens", "3", "--url", "{url}"],
        "--chunk-tokens: Input should be greater than or equal to 16, got 3",
    ),
    "long question": (["ask", "W" * 500, "{text}", "--question-tokens", "9", "--url", "{url}"], "its budget is 9"),
    "bad temperature": (
        ["ask", "W?", "{text}", "--temperature", "-1", "--url", "{url}"],
        "temperature must be between",
    ),
    "bad layout": (
        ["ask", "W?", "{text}", "--layout", "x", "--url", "{url}"],
        "--layout: Input should be 'memory_first' or 'chunk_first', got 'x'",
    ),
    "bad prompts": (["ask", "W?", "{text}", "--prompts", "/absent", "--url", "{url}"], "holds no prompts"),
    "false journal": (["ask", "W?", "{text}", "--journal", "{text}", "--url", "{url}"], "is not a journal of memjax"),
    "budget of another agent": (
        ["ask", "W?", "{text}", "--agent", "single", "--chunk-tokens", "99", "--url", "{url}"],
        "--chunk-tokens: the agent single has no such setting; leave it out",
    ),
    "no journal": (["journal", "show", "absent.jsonl"], "there is no journal"),
    "bad url": (["ask", "W?", "{text}", "--url", "nonsense", "-m", "m"], "'nonsense' is not an http URL"),
    "unlisted model": (["ask", "W?", "{text}", "--url", "http://127.0.0.1:9/v1"], "say which with --model NAME"),
    "no slots": (["ask", "W?", "{text}", "--slots", "0", "--url", "{url}"], "--slots: Input should be greater"),
    "swapped": (["ask", "{text}", "What is it?"], 'the question comes first, memjax ask "What is it?" {text}'),
    "no number": (["ask", "W?", "{text}", "--chunk-tokens", "abc"], "'abc' is not an integer"),
    "bad dtype to read with": (
        ["ask", "W?", "{text}", "--dtype", "int4", "--url", "{url}"],
        "--dtype: Input should be 'float32' or 'bfloat16'",
    ),
    "bad dtype": (["convert", "{dir}", "{dir}/out", "--dtype", "int4"], "--dtype must be float32 or bfloat16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(name, text, tmp_path):
    arguments, message = BAD[name]
    with serving(lambda prompt, params: "x") as service:
        places = {"{text}": str(text), "{dir}": str(tmp_path), "{url}": service.url}

        def filled(argument):
            for mark, place in places.items():
                argument = argument.replace(mark, place)
            return argument

        result = run(*map(filled, arguments))
    assert result.exit_code == 2, result.output
    assert filled(message) in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_service_that_is_down_is_exit_code_1_and_debug_shows_the_traceback(text, monkeypatch):
    monkeypatch.setattr("memjax.rollout.http.RetryPolicy.wait", lambda *_: 0.0)
    arguments = ["ask", "What?", text, "--url", "http://127.0.0.1:9/v1", "-m", "m"]
    result = run(*arguments)
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/v1 cannot be reached" in result.stderr
    assert "(try 2 of 6 in 0.0 s)" in result.stderr
    assert "to continue" not in result.stderr  # nothing was read
    debug = run(*arguments, "--debug")
    assert type(debug.exception).__name__ == "ClientError"


def test_an_error_of_ours_is_named_without_a_traceback(text, monkeypatch):
    def broken(*_, **__):
        raise KeyError("inside")

    monkeypatch.setattr("memjax.ask.open_document", broken)
    result = run("ask", "What?", text, "-m", "m")
    assert result.exit_code == 1
    assert "KeyError: 'inside' (an error of memjax; --debug shows where)" in result.stderr
