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

from memjax.serve.app import expire
from tests.serve.conftest import serving, wait_for

TEXT = "The lamp room door opens with a code. " * 25
BUDGETS = {"chunk_tokens": 100, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
ASK = {"text": TEXT, "question": "Which code?", **BUDGETS}
KEY = {"Authorization": "Bearer a"}
OTHER = {"Authorization": "Bearer b"}


def events_of(response: httpx.Response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def upload(server, text: str, **options) -> dict:
    return httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", text.encode())}, **options).json()


def drawn(server, run_id: str) -> list[list[int]]:
    """The ids of every reply: bytes of a random model are mostly no text that could be compared."""
    lines = server.get(f"/v1/memory/answers/{run_id}/trace").text.splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


def ask(server, **changes) -> dict:
    response = server.post("/v1/memory/answers", ASK | changes)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_document_is_read_chunk_by_chunk_and_answered(server):
    response = server.post("/v1/memory/answers", ASK | {"stream": True, "questions": ["Whose room?"]})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    chunks = [event for event in events if event["type"] == "chunk"]
    assert [event["chunk"] for event in chunks] == list(range(1, len(chunks) + 1))
    assert len(chunks) > 4
    assert chunks[-1]["chunks"] == len(chunks)
    assert chunks[-1]["tokens_read"] == chunks[-1]["document_tokens"]
    assert [memory["question"] for memory in chunks[0]["memories"]] == ["Which code?", "Whose room?"]
    assert all(event["tokens_per_second"] > 0 for event in chunks)
    assert events[-2]["type"] == "answer"
    assert len(events[-2]["answers"]) == 2
    assert events[-1] == {"type": "end", "status": "done", "error": None}


def test_one_json_says_the_same_as_the_events(server):
    whole = ask(server)
    assert whole["status"] == "done"
    run = server.get(f"/v1/memory/answers/{whole['id']}").json()
    assert run == whole
    events = events_of(server.get(f"/v1/memory/answers/{whole['id']}/events"))
    assert events[-2]["answers"] == whole["answers"]
    assert events[-3]["memories"] == whole["memories"]


def test_a_reader_comes_back_by_id_and_after_the_event_it_saw_last(server):
    run = ask(server)
    path = f"/v1/memory/answers/{run['id']}/events"
    events = events_of(server.get(path))
    later = events_of(server.get(path, headers={"Last-Event-ID": "2"}))
    assert later == [event for event in events if event.get("id", 3) > 2]


def test_the_run_of_a_reader_that_leaves_goes_on(server):
    with httpx.stream("POST", f"{server.url}/v1/memory/answers", json=ASK | {"stream": True}, timeout=60) as response:
        run_id = response.headers["x-memjax-run"]
    wait_for(lambda: server.get(f"/v1/memory/answers/{run_id}").json()["status"] == "done")
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


def test_appended_text_costs_only_its_own_chunks(server):
    more = "The keeper left in the spring. " * 4
    run = ask(server)
    calls = run["counters"]["model_calls"]
    assert server.post(f"/v1/memory/answers/{run['id']}/append", {"text": more}).status_code == 200
    wait_for(lambda: server.get(f"/v1/memory/answers/{run['id']}").json()["status"] == "done")
    longer = server.get(f"/v1/memory/answers/{run['id']}").json()
    added = longer["chunks_read"] - run["chunks_read"]
    assert added >= 1
    assert longer["counters"]["model_calls"] == calls + added + 1  # and the answer
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
            if '"chunk": 2' in line:
                break
    stopped = server.post(f"/v1/memory/answers/{run_id}/stop").json()
    if stopped["status"] == "stopped":  # else it was faster
        assert stopped["answers"] is None
    server.post(f"/v1/memory/answers/{run_id}/resume")
    wait_for(lambda: server.get(f"/v1/memory/answers/{run_id}").json()["status"] == "done")
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
            next(line for line in lines if '"chunk": 1' in line)
            server.parts.reader.end_all()
            rest = list(lines)
        assert '"reading"' in rest[-2]
    with serving(engine, loaded, tmp_path) as server:
        events = events_of(server.get(f"/v1/memory/answers/{run_id}/events"))
        assert [event["chunk"] for event in events if event["type"] == "chunk"] == list(
            range(1, whole["chunks_read"] + 1)
        )
        assert drawn(server, run_id) == undisturbed
        resumed = server.get(f"/v1/memory/answers/{run_id}").json()
    assert resumed["answers"] == whole["answers"]
    assert resumed["counters"]["model_calls"] == whole["counters"]["model_calls"]


def test_nothing_of_one_key_is_visible_to_another(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, keys=("a", "b")) as server:
        file = httpx.post(f"{server.url}/v1/files", files={"file": ("mine.txt", b"secret text")}, headers=KEY).json()
        run = server.post("/v1/memory/answers", ASK, headers=KEY).json()
        for path in ("", "/events", "/trace"):
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
        ({"chunk_tokens": 1}, "chunk"),
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
    from memjax import ask as ask_module

    save, left = ask_module.save_state, [2]

    def save_twice(path, state):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, state)

    with monkeypatch.context() as patch:
        patch.setattr(ask_module, "save_state", save_twice)
        response = server.post("/v1/memory/answers", ASK)
    assert response.status_code == 503
    assert "No space left" in response.json()["error"]
    run_id = response.json()["id"]
    server.post(f"/v1/memory/answers/{run_id}/resume")
    wait_for(lambda: server.get(f"/v1/memory/answers/{run_id}").json()["status"] == "done")


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


def test_the_trace_has_a_line_for_every_call(server):
    run = ask(server)
    lines = server.get(f"/v1/memory/answers/{run['id']}/trace").text.splitlines()
    assert len(lines) == run["counters"]["model_calls"]
    assert {json.loads(line)["kind"] for line in lines} == {"memory", "final"}


def test_a_deleted_reading_is_gone(server):
    run = ask(server)
    assert httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}").json()["deleted"]
    assert server.get(f"/v1/memory/answers/{run['id']}").status_code == 404
    assert not list(server.settings.state_dir.rglob(run["id"]))


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
    wait_for(lambda: not server.parts.runs.list("public") or server.parts.reader.active == 0)


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
    assert reply.choices[0].finish_reason == "stop"
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
    with serving(engine, loaded, tmp_path / "state", prompts=prompts) as server:
        run = ask(server)
        first = json.loads(server.get(f"/v1/memory/answers/{run['id']}/trace").text.splitlines()[0])
    assert run["status"] == "done"
    assert first["prompt"][0]["content"].startswith("Asked Which code? Known nothing Read The lamp room")
