"""`memjax ask` from the command line: answers, refusals, and runs that continue after any interruption."""

import fcntl
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from memjax import journals
from memjax.ask_display import AskDisplay
from memjax.cli import app
from memjax.episodes.journal import Journal, read_lines
from memjax.rollout.fake import NeedleReader
from tests.eval.stub_service import serving
from tests.tiny_model import write_tiny_model

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


def single(service, *arguments):
    return run("ask", *arguments, "--agent", "single", "--url", service.url, "--model", "stub")


CODE = NeedleReader(r"code is (\d+)")


def calls(path):
    """The calls of the model that a journal holds."""
    return [line for _, _, line in read_lines(path) if line["type"] == "call"]


def kept():
    return sorted(journals.journal_directory().glob("*"))


def test_the_answer_alone_goes_to_standard_output(document, monkeypatch):
    monkeypatch.setattr("memjax.ask_display._LINES_EVERY", 0)
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "4711\n"
    assert "chunk 1 of about" in result.stderr
    first = next(line for line in result.stderr.splitlines() if line.startswith("chunk 1 of about"))
    assert "tokens/s" not in first
    assert "left" not in first
    assert re.search(r"^chunk 3 of .*tokens/s, .* left$", result.stderr, re.MULTILINE)


def test_without_a_terminal_lines_are_few(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document)
    assert "chunk 2" not in result.stderr  # less than five seconds after the first
    assert "answering" in result.stderr
    assert re.search(r"^\d+ document tokens in \d chunks, .* s, \d+ tokens/s\.$", result.stderr, re.MULTILINE)


def test_without_a_terminal_a_line_says_what_is_waited_for():
    err = io.StringIO()
    display = AskDisplay(Console(file=err), ["What?"], show_memory=False, compiles=True)
    with display.reading(), display.waiting("loading m"):
        assert err.getvalue() == "loading m\n"
    assert err.getvalue() == "loading m\nreading; the first chunk also compiles\n"


def test_json_is_one_object_with_answer_memory_counts_and_settings(document):
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document, "--json", "--show-memory")
    outcome = json.loads(result.stdout)
    (answer,) = outcome["answers"]
    assert answer["question"] == "What is the code?"
    assert (answer["answer"], answer["reply"], answer["memory"]) == ("4711", "\\boxed{4711}", "- 4711")
    assert outcome["counters"]["model_calls"] == outcome["chunks"] + 1 > 4
    assert outcome["settings"]["agent"]["chunk"] == 300
    assert outcome["identity"]["model"] == "stub"
    assert calls(Path(answer["journal"]))[-1]["kind"] == "final"
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


def test_the_journal_holds_every_prompt_and_reply(document, tmp_path):
    path = tmp_path / "journal.jsonl"
    with serving(CODE) as service:
        ask(service, "What is the code?", document, "--journal", path)
    read = calls(path)
    assert [call["reply"]["text"] for call in read[-1:]] == ["\\boxed{4711}"]
    assert [call["kind"] for call in read[-2:]] == ["memory", "final"]
    assert len(read) == len(service.prompts)
    assert [part for part in read[0]["prompt"][0]["content"] if isinstance(part, dict)] == [{"chunk": 0}]


def test_the_single_agent_reads_at_once_and_refuses_what_does_not_fit(document):
    with serving(lambda prompt, params: "\\boxed{4711}" if TEXT in prompt else "?") as service:
        result = single(service, "What is the code?", document)
    assert result.stdout == "4711\n"
    assert "document tokens in one turn" in result.stderr
    with serving(CODE, window=1000) as service:
        result = single(service, "What is the code?", document)
    assert result.exit_code == 2
    assert "the window of stub (1000) holds" in result.stderr


def test_a_question_may_come_without_a_document_where_the_agent_needs_none(document, tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def answer(task, episode):\n    return (await episode.chat(task.question, max_tokens=9)).text\n"
    )
    with serving(lambda prompt, params: "42") as service:
        for agent in ("no-context", f"{tmp_path}/mine.py:answer"):
            for replayed in (0, 1):
                answered = run("ask", "What is it?", "--url", service.url, "--model", "m", "--agent", agent, "--json")
                told = json.loads(answered.stdout)
                assert (told["answers"][0]["answer"], told["counters"]["replayed_calls"]) == ("42", replayed)
        refused = run("ask", "What is it?", "--url", service.url, "--model", "m")
    assert (refused.exit_code, "no document given" in refused.stderr) == (2, True)


def test_replies_that_say_nothing_are_told_with_what_to_do(document):
    with serving(lambda prompt, params: "<think>on and on" if "section" in prompt else "4711") as service:
        result = ask(service, "What is the code?", document, "--json")
    (answered,) = json.loads(result.stdout)["answers"]
    (note,) = answered["notes"]
    assert (answered["answer"], answered["memory"]) == ("4711", "")
    assert re.fullmatch(r"(\d+) of \1 memories came back empty \(finish_reason stop\)", note)
    assert note in result.stderr


def test_half_a_character_in_a_question_is_read_as_text(document):
    with serving(CODE) as service:
        result = ask(service, "What \udc80 is the code?", document, "--json")
    assert json.loads(result.stdout)["answers"][0]["question"] == "What \ufffd is the code?"
    assert "What \ufffd is" in service.prompts[0]


def test_default_budgets_shrink_to_a_small_window_and_chosen_ones_are_refused(document):
    with serving(CODE, window=2048) as service:
        result = run("ask", "What is the code?", document, "--url", service.url, "--json")
        assert result.exit_code == 0, result.stderr
        chosen = run("ask", "What is the code?", document, "--url", service.url, "--chunk-tokens", 3000)
    settings = json.loads(result.stdout)["settings"]
    assert settings["agent"]["memory"] == settings["agent"]["answer"] == 256
    assert 1000 < settings["agent"]["chunk"] < 2048
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


def fails_at(call):
    """A service that fails for good at one of its calls."""
    return lambda number: 400 if number == call else 200


def test_a_failure_before_the_first_chunk_leaves_nothing_to_resume(document, tmp_path):
    with serving(chained) as service:
        service.status = fails_at(0)
        broken = ask(service, "What?", document)
    assert broken.exit_code == 1
    assert "continue" not in broken.stderr
    assert kept() == []


@pytest.mark.parametrize("at", [1, 4])
def test_the_same_command_continues_a_failed_run_to_the_same_end(document, at):
    with serving(chained) as service:
        straight = json.loads(ask(service, "What?", document, "--json", "--temperature", "0.8").stdout)
        kept()[0].unlink()
    with serving(chained) as service:
        service.status = fails_at(at)
        broken = ask(service, "What?", document, "--temperature", "0.8")
    assert broken.exit_code == 1
    *_, error, hint = broken.stderr.splitlines()
    assert "HTTP 400" in error
    assert hint.endswith(f"what was read is kept in {kept()[0]}: run the same command to continue")
    assert "Traceback" not in broken.stderr
    assert len(calls(kept()[0])) == at
    with serving(chained) as service:
        resumed = ask(service, "What?", document, "--json", "--temperature", "0.8")
    assert resumed.exit_code == 0, resumed.stderr
    assert f"continuing: {at} call" in resumed.stderr
    assert f"{at} of {straight['chunks'] + 1} calls replayed from the journal" in resumed.stderr
    outcome = json.loads(resumed.stdout)
    assert outcome["answers"] == straight["answers"]
    assert outcome["counters"] == straight["counters"] | {"replayed_calls": at}
    assert outcome["document_tokens"] == straight["document_tokens"]
    assert len(service.prompts) == straight["chunks"] - at + 1
    assert len(calls(kept()[0])) == straight["chunks"] + 1


def test_a_finished_run_is_answered_again_without_a_call(document):
    with serving(CODE) as service:
        ask(service, "What is the code?", document)
        asked = len(service.prompts)
        result = ask(service, "What is the code?", document, "--show-memory")
        assert (result.exit_code, result.stdout) == (0, "4711\n")
        assert f"{asked} of {asked} calls replayed" in result.stderr
        assert "memory after chunk 2" in result.stderr
        assert "asking" not in result.stderr  # nobody was
        assert len(service.prompts) == asked
        ask(service, "What is the code?", document, "--fresh")
        assert len(service.prompts) == 2 * asked


def test_appended_text_costs_its_own_chunks_and_another_question_itself(document):
    with serving(chained) as service:
        whole = json.loads(ask(service, "What?", document, "--json").stdout)
        document.write_text(TEXT + FILLER)
        longer = json.loads(ask(service, "What?", document, "--json").stdout)
        assert len(service.prompts) - (whole["chunks"] + 1) == longer["chunks"] - (whole["chunks"] - 1) + 1
        before = len(service.prompts)
        result = run(
            "ask", "-q", "What?", "-q", "Who?", document, "--url", service.url, "--model", "stub", *BUDGETS, "--json"
        )
    assert len(service.prompts) - before == longer["chunks"] + 1
    assert json.loads(result.stdout)["answers"][0] == longer["answers"][0]


def test_budgets_fitted_to_a_small_window_stay_for_appended_text_and_other_questions(document):
    long = "".join(f"Line {i} says that the wind blew from the west. " for i in range(1000))

    def asked(*questions):
        before = len(service.prompts)
        several = [word for question in questions for word in ("-q", question)]
        result = run("ask", *several, document, "--url", service.url, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout), len(service.prompts) - before

    with serving(chained, window=4096) as service:
        document.write_text(long)
        whole, calls_of_whole = asked("What?")
        assert calls_of_whole == whole["chunks"] + 1 > 5
        document.write_text(long + long[:9000])
        longer, live = asked("What?")
        assert live == longer["chunks"] - (whole["chunks"] - 1) + 1
        at = len(long) // 2
        document.write_text(long[:at] + "Changed" + long[at:])
        edited, live = asked("What?")
        assert live <= edited["chunks"] - edited["chunks"] // 2 + 2
        document.write_text(long)
        other = "And who says so, at which hour of the day, and what does he see when he looks out of the window?"
        both, live = asked("What?", other)
        assert live == whole["chunks"] + 1  # the other question, and nothing of the first
        assert both["settings"]["agent"] == whole["settings"]["agent"]
        assert asked("What?")[1] == asked(other)[1] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (["--chunk-tokens", "200"], "agent.chunk was 300, is 200"),
        (["--temperature", "1"], "sampling.temperature was 0.0, is 1.0"),
        (["--model", "another"], "identity.model was 'stub', is 'another'"),
        ("document", "document.content was"),
        ("prompts", "prompts was"),
    ],
)
def test_another_run_in_the_journal_is_told_by_what_differs_and_nothing_is_read(document, tmp_path, change, field):
    journal, prompts = tmp_path / "journal.jsonl", tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "memory.txt").write_text("{chunk} {question} {memory}")
    (prompts / "final.txt").write_text("{question} {memory}")
    (prompts / "no_memory.txt").write_text("void")
    options = ["What?", document, "--journal", journal, *BUDGETS]
    with serving(chained) as service:
        service.status = fails_at(2)
        run("ask", *options, "--prompts", prompts, "--url", service.url, "--model", "stub")
    if change == "document":
        document.write_text("More. " + TEXT)
    if change == "prompts":
        (prompts / "memory.txt").write_text("{chunk} {question} {memory}!")
    with serving(chained) as service:
        extra = change if isinstance(change, list) else []
        result = run("ask", *options, "--prompts", prompts, "--url", service.url, "--model", "stub", *extra)
        assert result.exit_code == 2
        assert field in result.stderr
        assert "--journal FILE names another one; --fresh empties this one and starts over" in result.stderr
        assert service.prompts == []
        assert len(calls(journal)) == 2
        again = run("ask", *options, "--prompts", prompts, "--url", service.url, "--model", "stub", *extra, "--fresh")
    assert again.exit_code == 0, again.stderr


def test_a_piped_document_continues_when_it_is_piped_again_and_from_its_copy(document, tmp_path):
    with serving(chained) as service:
        straight = ask(service, "What?", "-", stdin=TEXT)
        assert len(kept()) == 1  # the copy of the pipe is gone
        asked = len(service.prompts)
        assert ask(service, "What?", "-", stdin=TEXT).stdout == straight.stdout
        assert len(service.prompts) == asked
        kept()[0].unlink()
        for from_copy in (False, True):
            service.status = fails_at(len(service.prompts) + 2)
            broken = ask(service, "What?", "-", stdin=TEXT)
            (copy,) = [path for path in kept() if path.suffix != ".jsonl"]
            assert f"standard input is kept as {copy}; ask about that file to continue" in broken.stderr
            service.status = lambda call: 200
            before = len(service.prompts)
            again = ask(service, "What?", copy) if from_copy else ask(service, "What?", "-", stdin=TEXT)
            assert again.stdout == straight.stdout
            assert len(service.prompts) - before == asked - 2
            for path in kept():
                path.unlink()
        ask(service, "What?", "-", stdin="Another text.")
        assert len(kept()) == 1


def test_text_that_an_agent_leaves_out_is_told(document):
    with serving(CODE, window=2000) as service:
        result = run(
            "ask", "What?", document, "--agent", "single-truncated", "--url", service.url, "--answer-tokens", 900
        )
    assert result.exit_code == 0, result.stderr
    assert "tokens in the middle of the text did not fit and were left out" in result.stderr


def test_removing_a_journal_touches_nothing_else(document, tmp_path):
    with serving(CODE) as service:
        ask(service, "What is the code?", document)
    (name,) = [path.name for path in kept()]
    assert "is not a journal of memjax" in run("journal", "rm", document).stderr
    assert run("journal", "rm", name, "--all").exit_code == 2
    with Journal(kept()[0]):
        for arguments in ([name], ["--all"]):
            refused = run("journal", "rm", *arguments)
            assert (refused.exit_code, f"is in use by process {os.getpid()}" in refused.stderr) == (2, True)
    assert document.exists()
    assert [path.name for path in kept()] == [name]
    assert run("journal", "rm", name.removesuffix(".jsonl")).exit_code == 0


def test_two_questions_may_be_asked_side_by_side_and_two_commands_on_one_journal_may_not(document, tmp_path):
    journal = tmp_path / "journal.jsonl"
    with serving(CODE) as service, Journal(journal):
        refused = ask(service, "What is the code?", document, "--journal", journal)
        assert refused.exit_code == 2
        assert f"is in use by process {os.getpid()}: wait until it is done, or stop it" in refused.stderr
        assert service.prompts == []
        assert ask(service, "What is the code?", document).stdout == "4711\n"


def test_what_is_not_a_journal_is_not_touched(document, tmp_path):
    (tmp_path / "notes.txt").write_text("mine\n")
    with serving(CODE) as service:
        result = ask(service, "What is the code?", document, "--journal", tmp_path / "notes.txt")
    assert result.exit_code == 2
    assert "notes.txt is not a journal of memjax: name another file" in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_a_document_that_changes_while_it_is_read_is_not_answered_from(document):
    long = TEXT * 60  # it is read as it is needed, not at once

    def reply(prompt, params):
        if len(service.prompts) == 2:
            document.write_text(long.replace("wind", "rain"))
        return CODE(prompt, params)

    document.write_text(long)
    with serving(reply) as service:
        result = run("ask", "What?", document, "--url", service.url, "--chunk-tokens", 5000)
    assert result.exit_code == 2
    assert "text.txt changed while it was read" in result.stderr
    assert result.stdout == ""


def test_a_log_that_grows_while_it_is_read_is_answered_as_it_was(document):
    def reply(prompt, params):
        with document.open("a") as log:
            log.write("One more line. " * 40)
        return CODE(prompt, params)

    with serving(reply) as service:
        assert ask(service, "What is the code?", document).stdout == "4711\n"
    assert not any("One more line" in prompt for prompt in service.prompts)


def test_a_torn_line_is_told_and_costs_its_call(document):
    with serving(chained) as service:
        straight = ask(service, "What?", document)
        (path,) = kept()
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rindex(b'{"type": "call"') + 100])
        asked = len(service.prompts)
        again = ask(service, "What?", document)
    assert "the last line was written in half, and dropped" in again.stderr
    assert again.stdout == straight.stdout
    assert len(service.prompts) == asked + 1


def test_journals_are_listed_shown_removed_and_expire(document):
    with serving(CODE) as service:
        ask(service, "What is the code?", document)
        service.status = fails_at(len(service.prompts) + 2)
        ask(service, "Which gate?", document)
    (journals.journal_directory() / "broken.jsonl").write_text("x\n")
    listed = run("journal", "list").stdout
    assert "What is the code?" in listed
    assert "failed: " in listed
    assert "answered" in listed
    assert "damaged: " in listed
    name = next(path.name for path in kept() if b"What is the code?" in path.read_bytes())
    shown = run("journal", "show", name).stdout
    assert "4711" in shown
    assert "text.txt" in shown
    assert run("journal", "rm", name).exit_code == 0
    assert name not in run("journal", "list").stdout
    assert run("journal", "rm", name).exit_code == 2
    for path in kept():
        os.utime(path, (1, 1))
    with serving(CODE) as service:
        ask(service, "What is the code?", document)
    assert [path.name for path in kept()] == [name]


def _until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_killed_continues_with_the_call_under_way(document, blow, code):
    with serving(chained) as service:
        straight = json.loads(ask(service, "What?", document, "--json").stdout)
        kept()[0].unlink()
    with serving(chained, seconds=0.2) as service:
        command = [sys.executable, "-m", "memjax.cli", "ask", "What?", str(document), "--model", "stub", *BUDGETS]
        command += ["--url", service.url]
        heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        signal.signal(signal.SIGINT, heard)
        _until(lambda: len(service.prompts) >= 4, process)
        process.send_signal(blow)
        out, err = process.communicate()
        begun = len(service.prompts)
    assert process.returncode == code
    assert out == ""
    if blow != signal.SIGKILL:
        assert "run the same command to continue" in err
        assert "Traceback" not in err
    done = len(calls(kept()[0]))
    assert begun - 1 <= done <= begun
    with serving(chained) as service:
        resumed = json.loads(ask(service, "What?", document, "--json").stdout)
    assert resumed["answers"] == straight["answers"]
    assert len(service.prompts) == straight["chunks"] - done + 1


def test_a_run_continues_in_the_dtype_that_it_began_with(document, tmp_path, monkeypatch):
    from memjax.rollout import connect

    model = write_tiny_model(tmp_path / "model")
    options = [document, "--model", model, "--chunk-tokens", 300, "--memory-tokens", 24, "--answer-tokens", 8]
    for default in ("float32", "bfloat16"):
        monkeypatch.setattr(connect, "default_dtype", lambda default=default: default)
        result = run("ask", "What?", *options, "--question-tokens", 16, "--json")
        assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["identity"]["dtype"] == "float32"
    assert json.loads(result.stdout)["counters"]["replayed_calls"] == len(calls(kept()[0]))
    other = run("ask", "What?", *options, "--question-tokens", 16, "--dtype", "bfloat16")
    assert "identity.dtype was 'float32', is 'bfloat16'" in other.stderr


def test_a_failure_takes_nothing_that_was_there_before(document, tmp_path):
    mine, turn = tmp_path / "mine.jsonl", '{"type": "demonstration", "episode": "1", "messages": [], "reply": "x"}\n'
    mine.write_text('{"type": "journal", "version": 2}\n' + turn)
    with serving(chained) as service:
        service.status = fails_at(0)
        assert ask(service, "What?", document, "--journal", mine).exit_code == 1
        assert turn in mine.read_text()
        service.status = lambda call: 200
        ask(service, "What?", document)
        (journal,) = kept()
        assert ask(service, "What was asked?", journal).exit_code == 0  # a journal is a text too
        assert journal.exists()
        with open(journal, "ab") as file:
            file.write(b"\xff")
        assert "is not valid UTF-8" in ask(service, "What was asked?", journal).stderr
    assert journal.exists()


def test_a_copy_of_a_pipe_stays_while_another_process_reads_it(document):
    with serving(chained) as service:
        service.status = fails_at(2)
        ask(service, "What?", "-", stdin=TEXT)
        (copy,) = [path for path in kept() if path.suffix != ".jsonl"]
        service.status = lambda call: 200
        with open(copy, "rb") as other:
            fcntl.flock(other, fcntl.LOCK_SH)
            assert ask(service, "What?", "-", stdin=TEXT).exit_code == 0
            assert copy.exists()
        assert ask(service, "What?", "-", stdin=TEXT).exit_code == 0
    assert not copy.exists()


def test_what_cannot_be_replayed_for_no_known_reason_is_not_read_again_in_silence(document):
    with serving(chained) as service:
        straight = ask(service, "What?", document)
        (journal,) = kept()
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(line.replace('"digest": "', '"digest": "x') for line in lines))
        again = ask(service, "What?", document)
    assert again.stdout == straight.stdout
    assert "none of its calls is among those of this run, so all is read again" in again.stderr
    assert "read again" not in straight.stderr
