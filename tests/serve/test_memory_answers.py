"""The memory loop as an endpoint: events, documents, resuming, appending, owners and expiry."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from pathlib import Path

import httpx
import openai
import pytest

from memjax.episodes.journal import Journal, read_lines
from memjax.rollout.local import LocalClient
from memjax.serve import memory_view
from memjax.serve.app import expire
from memjax.serve.memory_reader import MemoryReader
from memjax.serve.settings import ServeSettings
from tests.serve.conftest import running_server, serving, wait_for
from tests.tiny_model import write_tiny_model

TEXT = "The lamp room door opens with a code. " * 25
BUDGETS = {"chunk_tokens": 100, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
ASK = {"text": TEXT, "question": "Which code?", **BUDGETS}
KEY = {"Authorization": "Bearer a"}
OTHER = {"Authorization": "Bearer b"}


def events_of(response: httpx.Response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def upload(server, text: str, **options) -> dict:
    return httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", text.encode())}, **options).json()


def journal(server, run_id: str) -> list[dict]:
    return [json.loads(line) for line in server.get(f"/v1/memory/answers/{run_id}/journal").text.splitlines()]


def calls(server, run_id: str) -> list[dict]:
    return [line for line in journal(server, run_id) if line["type"] == "call"]


def drawn(server, run_id: str) -> list[list[str | None]]:
    """What says the ids of every reply: bytes of a random model are mostly no text that could be compared."""
    return [[line["reply"].get(name) for name in ("text", "tokens", "ids")] for line in calls(server, run_id)]


def status(server, run_id: str) -> str:
    return server.get(f"/v1/memory/answers/{run_id}").json()["status"]


def wait_done(server, run_id: str) -> dict:
    wait_for(lambda: status(server, run_id) != "reading")
    run = server.get(f"/v1/memory/answers/{run_id}").json()
    assert run["status"] == "done", run["error"]
    return run


def read_events(events: list[dict], episode: str = "0") -> list[dict]:
    return [event for event in events if "chunk" in event and event["episode"] == episode]


def ask(server, **changes) -> dict:
    response = server.post("/v1/memory/answers", ASK | changes)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_document_is_read_chunk_by_chunk_and_answered(server):
    response = server.post("/v1/memory/answers", ASK | {"stream": True, "questions": ["Whose room?"]})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert events[0] == {
        "type": "run",
        "run": response.headers["x-memjax-run"],
        "documents": ["text"],
        "questions": ["Which code?", "Whose room?"],
    }
    begun = {event["episode"]: event["question"] for event in events if event["type"] == "begin"}
    assert begun == {"0": "Which code?", "1": "Whose room?"}
    for episode in begun:
        chunks = [event["chunk"] for event in read_events(events, episode)]
        assert [chunk["index"] for chunk in chunks] == list(range(len(chunks)))
        assert len(chunks) > 4
        assert chunks[-1]["start"] + chunks[-1]["tokens"] == chunks[-1]["document"]
    assert all(event["reply"]["seconds"] > 0 for event in read_events(events))
    assert {event["episode"] for event in events if event["type"] == "end"} == set(begun)
    assert events[-1] == {"type": "closed", "status": "done", "error": None}
    ids = [event["id"] for event in events if "id" in event]
    assert ids == sorted(set(ids))
    assert not any(
        {"prompt", "tokens", "ids", "logprobs"} & (event.keys() | event.get("reply", {}).keys()) for event in events
    )


def test_one_json_says_the_same_as_the_events(server):
    whole = ask(server)
    assert whole["status"] == "done"
    run = server.get(f"/v1/memory/answers/{whole['id']}").json()
    assert run == whole
    events = events_of(server.get(f"/v1/memory/answers/{whole['id']}/events"))
    assert events[-2]["answer"] == whole["answers"][0]["reply"]
    written = [event["reply"]["text"] for event in read_events(events) if event["reply"]["text"].strip()]
    assert written[-1] == whole["memories"][0]["memory"]
    assert len(read_events(events)) == whole["chunks_read"]
    assert whole["counters"]["model_calls"] == whole["chunks_read"] + 1


def test_a_reader_comes_back_by_id_and_after_the_event_it_saw_last(server):
    run = ask(server)
    path = f"/v1/memory/answers/{run['id']}/events"
    events = events_of(server.get(path))
    seen = events[2]["id"]
    later = events_of(server.get(path, headers={"Last-Event-ID": f"{seen}"}))
    assert later == [events[0], *events[3:]]


def test_the_run_of_a_reader_that_leaves_goes_on(server):
    with httpx.stream("POST", f"{server.url}/v1/memory/answers", json=ASK | {"stream": True}, timeout=60) as response:
        run_id = response.headers["x-memjax-run"]
    wait_done(server, run_id)
    assert drawn(server, run_id) == drawn(server, ask(server)["id"])


def test_inline_text_upload_and_file_id_are_the_same_document(server):
    inline = ask(server)
    kept = httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", TEXT.encode())}).json()
    by_id = server.post("/v1/memory/answers", {k: v for k, v in ASK.items() if k != "text"} | {"file_id": kept["id"]})
    form = {name: str(value) for name, value in ASK.items() if name != "text"}
    uploaded = httpx.post(
        f"{server.url}/v1/memory/answers", data=form, files={"file": ("b.txt", TEXT.encode())}, timeout=60
    )
    assert drawn(server, inline["id"]) == drawn(server, by_id.json()["id"]) == drawn(server, uploaded.json()["id"])
    assert uploaded.json()["documents"] == ["b.txt"]


def test_another_question_is_asked_about_the_documents_of_a_run_with_its_budgets(server):
    run = server.post("/v1/memory/answers", ASK | {"temperature": 0.5, "seed": 7}).json()
    longer = "Which code does the door of the lamp room have, and who set it?"
    again = server.post("/v1/memory/answers", {"from_run": run["id"], "question": longer}).json()
    assert (again["status"], again["documents"], again["bytes"]) == ("done", run["documents"], len(TEXT))
    for name in ("chunk_tokens", "memory_tokens", "answer_tokens", "temperature", "seed"):
        assert again["settings"][name] == run["settings"][name], name
    server_side = server.post("/v1/memory/answers", {"from_run": run["id"], "text": "More.", "question": "And now?"})
    assert server_side.json()["documents"] == [*run["documents"], "text"]
    httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}")
    assert status(server, again["id"]) == "done"  # its documents are its own
    gone = server.post("/v1/memory/answers", {"from_run": run["id"], "question": longer})
    assert (gone.status_code, run["id"] in gone.json()["error"]["message"]) == (404, True)


def test_a_text_of_megabytes_is_taken_as_a_part_of_a_form(server):
    text = b"The lamp room door opens with a code. " * 80_000
    form = {"question": "Which code?", "stream": "true"}
    with httpx.stream(
        "POST", f"{server.url}/v1/memory/answers", data=form, files={"file": ("The lamp.txt", text)}
    ) as got:
        assert got.status_code == 200
    run = server.get(f"/v1/memory/answers/{got.headers['X-Memjax-Run']}").json()
    assert (run["documents"], run["bytes"]) == (["The lamp.txt"], len(text))
    server.post(f"/v1/memory/answers/{run['id']}/stop")
    httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}")
    assert server.get("/ready").json()["max_body"] == server.settings.max_body


def test_appended_text_costs_only_its_own_chunks(server):
    more = "The keeper left in the spring. " * 4
    run = ask(server)
    made = run["counters"]["model_calls"]
    assert server.post(f"/v1/memory/answers/{run['id']}/append", {"text": more}).status_code == 200
    longer = wait_done(server, run["id"])
    added = longer["chunks_read"] - run["chunks_read"]
    assert added >= 1
    assert longer["counters"]["model_calls"] == made + added + 1  # and the answer
    assert longer["counters"]["replayed_calls"] == run["chunks_read"]
    files = [
        httpx.post(f"{server.url}/v1/files", files={"file": ("p", text.encode())}).json()["id"] for text in (TEXT, more)
    ]
    straight = ask(server, text=None, file_ids=files)
    read = drawn(server, run["id"])
    del read[run["chunks_read"]]  # the first answer
    assert read == drawn(server, straight["id"])


def test_a_run_is_stopped_and_resumed_to_the_same_memory(server):
    with httpx.stream("POST", f"{server.url}/v1/memory/answers", json=ASK | {"stream": True}, timeout=60) as response:
        run_id = response.headers["x-memjax-run"]
        for line in response.iter_lines():
            if '"index": 2' in line:
                break
    stopped = server.post(f"/v1/memory/answers/{run_id}/stop").json()
    if stopped["status"] == "stopped":  # else it was faster
        assert stopped["answers"] is None
    server.post(f"/v1/memory/answers/{run_id}/resume")
    wait_done(server, run_id)
    assert drawn(server, run_id) == drawn(server, ask(server)["id"])


def test_a_restarted_server_goes_on_in_the_middle_of_a_document(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path) as server:
        whole = ask(server)
        undisturbed = drawn(server, whole["id"])
        with httpx.stream(
            "POST", f"{server.url}/v1/memory/answers", json=ASK | {"stream": True}, timeout=60
        ) as response:
            run_id = response.headers["x-memjax-run"]
            lines = response.iter_lines()
            next(line for line in lines if '"index": 1' in line)
            server.parts.reader.end_all()
            rest = list(lines)
        assert '"reading"' in rest[-2]
    with serving(engine, loaded, tmp_path) as server:
        events = events_of(server.get(f"/v1/memory/answers/{run_id}/events"))
        assert [event["chunk"]["index"] for event in read_events(events)] == list(range(whole["chunks_read"]))
        assert drawn(server, run_id) == undisturbed
        resumed = server.get(f"/v1/memory/answers/{run_id}").json()
    assert resumed["answers"] == whole["answers"]
    assert resumed["counters"]["model_calls"] == whole["counters"]["model_calls"]


def test_nothing_of_one_key_is_visible_to_another(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, keys=("a", "b")) as server:
        file = httpx.post(f"{server.url}/v1/files", files={"file": ("mine.txt", b"secret text")}, headers=KEY).json()
        run = server.post("/v1/memory/answers", ASK, headers=KEY).json()
        for path in ("", "/events", "/journal"):
            assert server.get(f"/v1/memory/answers/{run['id']}{path}", headers=KEY).status_code == 200
            assert server.get(f"/v1/memory/answers/{run['id']}{path}", headers=OTHER).status_code == 404
        for path in ("/append", "/stop", "/resume"):
            body = {"text": "x"}
            assert server.post(f"/v1/memory/answers/{run['id']}{path}", body, headers=OTHER).status_code == 404
        assert httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}", headers=OTHER).status_code == 404
        assert server.get(f"/v1/files/{file['id']}", headers=OTHER).status_code == 404
        body = {name: value for name, value in ASK.items() if name != "text"} | {"file_id": file["id"]}
        assert server.post("/v1/memory/answers", body, headers=OTHER).status_code == 404
        for path in ("/v1/files", "/v1/memory/answers"):
            assert server.get(path, headers=OTHER).json()["data"] == []
            assert len(server.get(path, headers=KEY).json()["data"]) == 1


@pytest.mark.parametrize(
    "name", ["../../../../tmp/evil.txt", "/etc/passwd", "a\0b.txt", "..", "c:\\x\\y.txt", "é" * 400, ""]
)
def test_an_uploaded_name_never_reaches_the_file_system(server, name):
    before = _paths(server.settings.state_dir)
    response = httpx.post(
        f"{server.url}/v1/files", files={"file": (name or "x", b"Some text."), "purpose": (None, "user_data")}
    )
    assert response.status_code == 200, response.text
    added = _paths(server.settings.state_dir) - before
    assert {path.name for path in added} == {"content", "file.json", response.json()["id"]}
    assert "/" not in response.json()["filename"]


def _paths(root: Path) -> set[Path]:
    return set(root.rglob("*"))


@pytest.mark.parametrize(
    "file_id", ["../../runs", "file-../../../../etc", "file-" + "0" * 24, "%2e%2e", "file-" + "0" * 24 + "%0a"]
)
def test_an_id_that_is_none_is_not_found(server, file_id):
    assert server.get(f"/v1/files/{file_id}").status_code == 404
    response = server.post("/v1/memory/answers", {"file_id": file_id, "question": "What?", **BUDGETS})
    assert response.status_code == 404


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"question": None}, "no question"),
        ({"question": " "}, "question"),
        ({"question": "long " * 100}, "question"),
        ({"text": None}, "no document"),
        ({"text": " \n"}, "no text"),
        ({"chunk_tokens": 1}, "chunk_tokens"),
        ({"chunk_tokens": 10**6}, "chunk"),
        ({"memory_tokens": -5}, "memory_tokens"),
        ({"layout": "sideways"}, "layout"),
        ({"temperature": -1.0}, "temperature"),
        ({"questions": ["a"] * 33}, "questions"),
        ({"questions": "a"}, "questions"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_question_is_refused_in_a_sentence(server, changes, says):
    response = server.post("/v1/memory/answers", ASK | changes)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b"\xff\xfe\xfd", b"PK\x03\x04zip", b"\x1f\x8bpacked"])
def test_a_file_that_is_no_text_is_refused_and_not_kept(server, content):
    before = _paths(server.settings.state_dir / "files")
    response = httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", io.BytesIO(content))})
    assert response.status_code == 400, response.text
    assert _paths(server.settings.state_dir / "files") == before


def test_a_full_disk_fails_what_needs_it_and_nothing_else(server, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        response = server.post("/v1/memory/answers", ASK)
        assert response.status_code == 507
        assert "is full" in response.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", b"x")}).status_code == 507
        drawn = server.post("/generate", {"token_ids": [1], "max_tokens": 2})
        assert drawn.status_code == 200
    assert ask(server)["status"] == "done"


def test_a_disk_that_fills_up_while_reading_ends_that_reading(server, monkeypatch):
    fsync, left = os.fsync, [6]

    def fill_up(file):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_up)
        response = server.post("/v1/memory/answers", ASK)
        run_id = response.json()["id"]
        assert response.status_code == 507
        assert "is full (No space left on device): what was read is kept" in response.json()["error"]
        assert status(server, run_id) == "failed"  # though its record could not be written either
        assert server.post(f"/v1/memory/answers/{run_id}/resume").status_code == 507
    made = len(calls(server, run_id))
    assert made > 0
    server.post(f"/v1/memory/answers/{run_id}/resume")
    assert wait_done(server, run_id)["counters"]["replayed_calls"] == made
    assert drawn(server, run_id) == drawn(server, ask(server)["id"])


def test_readings_and_files_expire(server):
    run = ask(server)
    file = httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", b"x y")}).json()
    expire(server.parts, time.time() - 60)
    assert server.get(f"/v1/memory/answers/{run['id']}").status_code == 200
    expire(server.parts, time.time() + 1)
    assert server.get(f"/v1/memory/answers/{run['id']}").status_code == 404
    assert server.get(f"/v1/files/{file['id']}").status_code == 404


def test_too_many_readings_are_refused(engine, loaded, tmp_path):
    begun = ASK | {"stream": True}
    with (
        serving(engine, loaded, tmp_path, max_runs=1) as server,
        httpx.stream("POST", f"{server.url}/v1/memory/answers", json=begun, timeout=60),
    ):
        assert server.post("/v1/memory/answers", ASK).status_code == 429


def test_the_journal_has_a_line_for_every_call(server):
    run = ask(server)
    made = calls(server, run["id"])
    assert len(made) == run["counters"]["model_calls"]
    assert {line["kind"] for line in made} == {"memory", "final"}


def test_a_deleted_reading_is_gone(server):
    run = ask(server)
    assert httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}").json()["deleted"]
    assert server.get(f"/v1/memory/answers/{run['id']}").status_code == 404
    assert not list(server.settings.state_dir.rglob(run["id"]))


def test_events_that_a_kill_kept_from_a_follower_are_told_after_the_restart(engine, loaded, tmp_path, monkeypatch):
    with serving(engine, loaded, tmp_path) as server, monkeypatch.context() as patch:
        patch.setattr(MemoryReader, "_publish", lambda *_: None)  # every line is on disk, and nobody is told
        response = server.post("/v1/memory/answers", ASK | {"stream": True})
        run_id, before = response.headers["x-memjax-run"], events_of(response)
        assert [event["type"] for event in before] == ["run", "closed"]
    with serving(engine, loaded, tmp_path) as server:
        path = f"/v1/memory/answers/{run_id}/events"
        after = events_of(server.get(path, headers={"Last-Event-ID": "-1"}))
        made = calls(server, run_id)
    assert [event["digest"] for event in after if event["type"] == "call"] == [line["digest"] for line in made]
    assert after[-2]["type"] == "end"


def test_text_appended_while_a_document_is_read_is_read_after_it_and_no_call_is_made_twice(server):
    more, long = "The keeper left in the spring. " * 4, ASK | {"text": TEXT * 10}  # long enough to be still read
    with httpx.stream("POST", f"{server.url}/v1/memory/answers", json=long | {"stream": True}, timeout=60) as response:
        run_id = response.headers["x-memjax-run"]
        lines = response.iter_lines()
        next(line for line in lines if '"index": 1' in line)
        assert server.post(f"/v1/memory/answers/{run_id}/append", {"text": more}).json()["status"] == "reading"
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert rest[-1] == {"type": "closed", "status": "done", "error": None}
    assert [event["type"] for event in rest].count("end") == 2  # the follower has seen both drives
    run = wait_done(server, run_id)
    made = [(tuple(line["key"]), line["kind"]) for line in calls(server, run_id)]
    assert len(set(made)) == len(made) == run["counters"]["model_calls"]
    straight = ask(server, text=long["text"])
    assert run["chunks_read"] > straight["chunks_read"]
    assert drawn(server, run_id)[: len(drawn(server, straight["id"]))] == drawn(server, straight["id"])
    assert run["documents"] == ["text", "text"]


def test_questions_side_by_side_share_the_prefill_of_a_chunk(server):
    run = ask(server, questions=["Whose room?"], layout="chunk_first")
    assert run["counters"]["cached_tokens"] > 50 * run["chunks_read"]
    chunks = [line["chunk"]["index"] for line in calls(server, run["id"]) if "chunk" in line]
    assert chunks == sorted(chunks)  # neither question was a chunk ahead
    assert ask(server, questions=["Whose room?"])["counters"]["cached_tokens"] == 0


def test_a_run_of_another_model_fails_with_the_difference_and_costs_no_other(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path) as server:
        run = ask(server)
    other = write_tiny_model(tmp_path / "other", seed=1)
    settings = ServeSettings(model=str(other), state_dir=tmp_path, port=0, drain_seconds=5)
    with running_server(LocalClient(engine, loaded.tokenizer, model="tiny"), settings) as server:
        path = f"/v1/memory/answers/{run['id']}"
        assert server.get(path).json()["answers"] == run["answers"]
        server.post(f"{path}/append", {"text": "More."})
        wait_for(lambda: status(server, run["id"]) == "failed")
        assert "identity.weights was " in server.get(path).json()["error"]
        assert events_of(server.get(f"{path}/events"))[-1]["status"] == "failed"
        assert ask(server)["status"] == "done"
        assert len(calls(server, run["id"])) == run["counters"]["model_calls"]


def test_a_damaged_journal_damages_its_run_and_costs_no_other(server):
    run, other = ask(server), ask(server)
    path = server.parts.runs.journal_path(server.parts.runs.get("public", run["id"]))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[3:]]))
    shown = server.get(f"/v1/memory/answers/{run['id']}").json()
    assert (shown["status"], shown["answers"]) == ("damaged", None)
    assert shown["error"] == "this run is damaged, its journal cannot be read: delete it and begin it again"
    assert {other["id"], run["id"]} <= {one["id"] for one in server.get("/v1/memory/answers").json()["data"]}
    for path, body in (("append", {"text": "More."}), ("resume", None)):
        refused = server.post(f"/v1/memory/answers/{run['id']}/{path}", body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, shown["error"])
    closed = {"type": "closed", "status": "damaged", "error": shown["error"]}
    assert events_of(server.get(f"/v1/memory/answers/{run['id']}/events"))[-1] == closed
    server.post(f"/v1/memory/answers/{other['id']}/append", {"text": "More."})
    wait_done(server, other["id"])


def test_a_journal_that_another_process_writes_fails_the_run_and_can_be_resumed(server):
    run = ask(server)
    path = server.parts.runs.journal_path(server.parts.runs.get("public", run["id"]))
    with Journal(path):
        server.post(f"/v1/memory/answers/{run['id']}/append", {"text": "More."})
        wait_for(lambda: status(server, run["id"]) == "failed")
        error = server.get(f"/v1/memory/answers/{run['id']}").json()["error"]
        assert error == f"journal.jsonl is in use by process {os.getpid()}"
    server.post(f"/v1/memory/answers/{run['id']}/resume")
    wait_done(server, run["id"])


def test_a_server_offers_the_agent_it_was_started_with(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, agent={"name": "single", "answer": 24}) as server:
        refused = server.post("/v1/memory/answers", ASK)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("chunk_tokens: the agent single")
        run = server.post("/v1/memory/answers", {"text": TEXT[:300], "question": "Which code?"}).json()
        assert (run["status"], run["chunks_read"]) == ("done", 0)
        assert run["settings"]["answer_tokens"] == 24
        assert len(run["answers"]) == run["counters"]["model_calls"] == 1
        assert server.post("/v1/memory/answers", {"text": TEXT * 3, "question": "Which code?"}).status_code == 503


def test_an_agent_of_one_s_own_is_served_under_its_whole_path(engine, loaded, tmp_path):
    own = {"name": str(Path(__file__).parents[2] / "examples" / "bullets.py:Bullets"), "new": 8, "answer": 8}
    with serving(engine, loaded, tmp_path, agent=own | {"chunk": 60, "bullets": 16}) as server:
        refused = server.post("/v1/memory/answers", {"text": TEXT, "question": "Which code?", "memory_tokens": 9})
        assert refused.json()["error"]["message"].startswith("memory_tokens: the agent /")
        asked = {"text": TEXT, "question": "Which code?", "chunk_tokens": 40}
        run = server.post("/v1/memory/answers", asked).json()
        assert (run["status"], run["error"], run["settings"]["chunk_tokens"]) == ("done", None, 40)
        assert run["counters"]["model_calls"] == run["chunks_read"] + 1 > 2
        assert {call["kind"] for call in calls(server, run["id"])} == {"bullets", "answer"}
        alone = server.post("/v1/memory/answers", {"question": "Which code?"}).json()
        assert (alone["status"], alone["chunks_read"], alone["counters"]["model_calls"]) == ("done", 0, 1)


def test_a_list_of_runs_reads_only_the_journals_that_changed(server, monkeypatch):
    read = []

    def counted(path):
        read.append(path)
        return read_lines(path)

    runs = [ask(server) for _ in range(2)]
    server.get("/v1/memory/answers")
    monkeypatch.setattr(memory_view, "read_lines", counted)
    listed = {run["id"]: run for run in server.get("/v1/memory/answers").json()["data"]}
    assert not read
    assert [listed[run["id"]] for run in runs] == runs


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_longer_than_the_window_is_read_with_the_loop(client, server, stream):
    messages = [{"role": "user", "content": f"{TEXT}\n\nWhich code?"}]
    options = {"model": "memory/tiny", "messages": messages, "max_tokens": 16, "temperature": 0.0}
    reply = client.chat.completions.create(**options, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    else:
        text = reply.choices[0].message.content
        assert reply.usage.completion_tokens > 16
    parts = [{"role": "user", "content": TEXT}, {"role": "user", "content": "Which code?"}]
    again = client.chat.completions.create(**(options | {"messages": parts}))
    assert again.choices[0].message.content == text
    wait_for(lambda: not server.parts.runs.list("public") or not server.parts.reader.tasks)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 2}, "one answer"),
        ({"messages": [{"role": "user", "content": "word " * 900}]}, "no question found"),
        ({"messages": [{"role": "system", "content": "word " * 900}]}, "no question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}] * 101}]}, "101 files"),
    ],
)
def test_a_chat_that_cannot_be_read_is_refused_in_a_sentence(server, changes, says):
    messages = [{"role": "user", "content": f"{TEXT}\n\nWhich code?"}]
    response = server.post("/v1/chat/completions", {"model": "memory/tiny", "messages": messages} | changes)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


def test_a_file_in_a_chat_is_read_and_a_short_chat_is_answered_at_once(client, server):
    file = client.files.create(file=("a.txt", TEXT.encode()), purpose="user_data")
    content = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "Which code?"}]
    reply = client.chat.completions.create(
        model="memory/tiny", messages=[{"role": "user", "content": content}], max_tokens=8
    )
    assert reply.choices[0].finish_reason == "length"
    short = [{"role": "user", "content": "Hello"}]
    options = {"messages": short, "max_tokens": 4, "seed": 1}
    direct = client.chat.completions.create(model="memory/tiny", **options)
    assert direct.choices[0].message == client.chat.completions.create(model="tiny", **options).choices[0].message
    assert client.files.delete(file.id).deleted


def test_prompts_of_one_s_own_are_what_the_model_sees(engine, loaded, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "memory.txt").write_text("Asked {question} Known {memory} Read {chunk} Note:")
    (prompts / "final.txt").write_text("Asked {question} Known {memory} Say:")
    (prompts / "no_memory.txt").write_text("nothing")
    with serving(engine, loaded, tmp_path / "state", agent={"prompts": prompts}) as server:
        run = ask(server)
        shown = calls(server, run["id"])[0]["prompt"][0]["content"]
    assert run["status"] == "done"
    assert shown == ["Asked ", "Which code?", " Known ", "nothing", " Read ", {"chunk": 0}, " Note:"]
