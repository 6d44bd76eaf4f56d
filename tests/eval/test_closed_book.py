"""The closed-book filter asks every question once, keeps what was said, and drops only what is known."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from memjax.data.__main__ import app
from memjax.data.tasks import read_tasks, write_tasks
from memjax.eval.closed_book import Attempts, asked_file, filter_tasks, knows
from memjax.rollout.client import ClientError
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from tests.eval.forgetful import Wrapped, fact_task
from tests.eval.stub_service import serving

KNOWN = {2, 5}


def reply(prompt, params=None):
    """The model knows the codes of two boxes, with other words around them."""
    code = next((100_000 + 7919 * number for number in KNOWN if f"box{number}?" in prompt), None)
    return f"Of course:\n\\boxed{{{code}}}" if code else "It cannot be known."


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [fact_task(number, chunks=2) for number in range(8)])
    return file


def run(tasks, out, client, **settings):
    return asyncio.run(filter_tasks(tasks, out, client, ByteTokenizer(), Attempts(**settings), concurrency=2))


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (r"\boxed{Paris}", True),
        ("I would say Paris.", True),
        ("Parisian", False),
        (r"Paris? \boxed{Rome}", False),
        ("", False),
    ],
)
def test_a_reply_knows_the_answer_where_its_box_or_without_one_its_words_give_it(said, known):
    assert knows(said, ("Paris", "Paname")) is known


def test_what_is_answered_without_the_context_is_dropped_and_nothing_else(tasks, tmp_path):
    client = ScriptedClient(reply)
    outcome = run(tasks, tmp_path / "out.jsonl", client)
    assert (outcome.kept, outcome.known, outcome.failed) == (6, 2, 0)
    kept = list(read_tasks(tmp_path / "out.jsonl"))
    assert [task.id for task in kept] == [f"box{number}" for number in range(8) if number not in KNOWN]
    assert kept[0] == next(read_tasks(tasks))
    assert len({params.seed for params in client.params}) == len(client.params) == 6 * 2 + 2  # right at once: not again
    assert not any("Nothing of note" in "".join(map(str, prompt.messages)) for prompt in client.prompts)


def test_one_right_reply_of_several_is_enough(tasks, tmp_path):
    said = set()

    def second_time(prompt, params):
        again, _ = prompt in said, said.add(prompt)
        return reply(prompt) if again else "No idea."

    assert run(tasks, tmp_path / "out.jsonl", ScriptedClient(second_time)).known == 2


def test_a_killed_run_goes_on_and_questions_that_failed_are_asked_again(tasks, tmp_path):
    out = tmp_path / "out.jsonl"

    def down(call):
        if call in (1, 5):
            raise ClientError("503")

    first = run(tasks, out, Wrapped(ScriptedClient(reply), down, model="m"))
    assert (first.kept, first.failed) == (0, 2)
    assert not out.exists()
    lines = asked_file(out).read_bytes().splitlines(keepends=True)
    asked_file(out).write_bytes(b"".join(lines[:-1]) + lines[-1][:9])  # as a kill would leave it
    again = Wrapped(ScriptedClient(reply), lambda call: None, model="m")
    assert run(tasks, out, again).kept == 6
    assert again.calls == 3 * 2


def test_another_filter_cannot_go_on_with_the_replies_of_this_one(tasks, tmp_path):
    run(tasks, tmp_path / "out.jsonl", ScriptedClient(reply))
    with pytest.raises(ValueError, match=r"begun by another filter \(count was 2, is 3\): give another --out"):
        run(tasks, tmp_path / "out.jsonl", ScriptedClient(reply), count=3)


def test_the_command_says_what_it_dropped_and_what_it_could_not_ask(tasks, tmp_path):
    out = tmp_path / "out.jsonl"
    with serving(lambda prompt, params: reply(prompt)) as service:
        arguments = ["filter", str(tasks), "--out", str(out), "--url", service.url]
        service.status = lambda call: 400 if call < 1 else 200
        failed = CliRunner().invoke(app, [*arguments, "--concurrency", "1"])
        assert failed.exit_code == 1
        assert failed.stderr.startswith("memjax: 1 questions could not be asked (see ")
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "6 tasks kept, 2 dropped" in done.stdout
    rows = [json.loads(line) for line in asked_file(out).read_text().splitlines()]
    assert rows[0]["model"] == "stub"
    missing = CliRunner().invoke(app, ["filter", str(tmp_path / "no.jsonl"), "--out", str(out), "--force"])
    assert (missing.exit_code, missing.stderr) == (2, f"memjax: there is no file {tmp_path / 'no.jsonl'}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-p", "7"], "top_p must be in (0, 1], got 7.0"),
        (["--temperature", "900"], "temperature must be between 0 and 100"),
        ([], "bad.jsonl, line 2: not valid JSON"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(tasks, tmp_path, options, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(tasks.read_text().splitlines()[0] + '\n{"id": 3')
    with serving(lambda prompt, params: reply(prompt)) as service:
        arguments = ["filter", str(bad), "--out", str(tmp_path / "o.jsonl"), "--url", service.url, *options]
        result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert message in result.stderr


def test_a_reply_with_other_line_ends_does_not_break_what_was_asked(tasks, tmp_path):
    said = "One line\u2028and another\x85and \r a third"
    first = run(tasks, tmp_path / "out.jsonl", ScriptedClient(lambda prompt, params=None: said))
    again = ScriptedClient(lambda prompt, params=None: said)
    assert run(tasks, tmp_path / "out.jsonl", again) == first
    assert not again.prompts, "everything had been asked"
