"""State is a promise: whatever happens to the disk, the clock or a record, what was promised of the others holds.

The server's real application over a client whose replies are known.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memjax.rollout.fake import ByteTokenizer, NeedleReader, ScriptedClient
from memjax.rollout.scheduler import Counters
from memjax.serve import server as process
from memjax.serve.app import Parts, create_app, expire
from memjax.serve.disk import open_state
from memjax.serve.errors import ApiError
from memjax.serve.schemas import MemoryRequest
from memjax.serve.settings import ServeSettings
from memjax.serve.trusted_clock import TrustedClock
from tests.serve.conftest import wait_for

MARK = "XYLOGRAPH"  # in every document, and nowhere else
TEXT = f"The {MARK} code is 17. " * 30
BUDGETS = {"chunk_tokens": 300, "memory_tokens": 64, "answer_tokens": 64, "question_tokens": 64}
ASK = {"text": TEXT, "question": "Which code?", **BUDGETS}
FORM = {name: str(value) for name, value in ASK.items() if name != "text"}
RUNS = "/v1/memory/answers"
MODEL = Path(__file__).parents[2] / "memjax" / "assets" / "tiny"
HOURS = 3600.0


class KnownBackend(ScriptedClient):
    """Replies at once, or waits before every reply while `is_held`."""

    tokenizer, slots, running, failure, compilations, weights_version = ByteTokenizer(), 4, 0, None, 0, 0
    counters = Counters()

    def __init__(self) -> None:
        super().__init__(NeedleReader(r"code is (\d+)"), window=8192)
        self.is_held = False

    async def complete(self, prompt, params):
        """Reply as scripted."""
        while self.is_held:
            await asyncio.sleep(0.002)
        return await super().complete(prompt, params)

    def warm_up(self) -> None:
        """Nothing is compiled."""


class Serving:
    """A client of an application, and the insides of that."""

    def __init__(self, web: TestClient, app, backend: KnownBackend, root: Path):
        self.web, self.parts, self.backend, self.root = web, app.state.parts, backend, root

    def ask(self, **changes) -> dict:
        response = self.web.post(RUNS, json=ASK | changes)
        assert response.status_code == 200, response.text
        return response.json()

    def upload(self, text: str = TEXT) -> dict:
        return self.web.post("/v1/files", files={"file": ("a.txt", text.encode())}).json()

    def begin(self, owner: str = "public"):
        """A run that is held at its first call."""
        self.backend.is_held = True
        return self.parts.memory.begin(owner, MemoryRequest(**ASK))

    def run(self, run_id: str) -> dict:
        return self.web.get(f"{RUNS}/{run_id}").json()

    def runs(self) -> dict[str, dict]:
        response = self.web.get(RUNS)
        assert response.status_code == 200, response.text
        return {run["id"]: run for run in response.json()["data"]}

    def files(self) -> dict[str, dict]:
        response = self.web.get("/v1/files")
        assert response.status_code == 200, response.text
        return {file["id"]: file for file in response.json()["data"]}

    def closed(self, run_id: str) -> dict:
        """The last event of a run's stream."""
        lines = [line for line in self.web.get(f"{RUNS}/{run_id}/events").text.splitlines() if line.startswith("data")]
        return json.loads(lines[-1].removeprefix("data: "))


@contextmanager
def served(root: Path, **given) -> Iterator[Serving]:
    keys = given.pop("keys", ())
    backend = KnownBackend()
    app = create_app(backend, ServeSettings(model=str(MODEL), state_dir=root, **given), keys=keys)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as web:
        wait_for(lambda: app.state.parts.service.ready)
        yield Serving(web, app, backend, root)
        backend.is_held = False


def marked(root: Path) -> list[Path]:
    """The files under a directory in which something of a document is left."""
    found = [path for path in root.rglob("*") if path.is_file()]
    return [
        path for path in found if MARK.encode() in path.read_bytes() or path.name.startswith(("document", "content"))
    ]


def refusal(response) -> str:
    return response.json()["error"]["message"]


# -- a damaged record costs no other


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[Serving]:
    """Three runs, of which the last was stopped in the middle, and two files."""
    with served(tmp_path_factory.mktemp("state") / "serve") as serving:
        serving.ask()
        serving.ask(questions=["Which door?"])
        serving.upload()
        serving.upload()
        record = serving.begin()
        serving.web.post(f"{RUNS}/{record.id}/stop")
        serving.backend.is_held = False
        yield serving


OVERWRITTEN = "overwritten in the middle"


def damages(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What a file may be found as; None is a file that is gone."""
    dice = random.Random(len(content))
    yield "removed", None
    yield "empty", b""
    for share in (0.3, 0.98):
        yield f"truncated at {share}", content[: int(len(content) * share)]
    yield "garbage", dice.randbytes(200)
    yield "deep", b"[" * 5000
    yield "other JSON", b'{"x": 1}\n'
    yield "no object", b"null\n"
    middle = len(content) // 2
    yield OVERWRITTEN, content[:middle] + dice.randbytes(40) + content[middle + 40 :]
    yield "unknown setting", content.replace(b'"name":"memagent"', b'"name":"memagent","of_another_version":1')


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with other content; its whole directory is afterwards as it was."""
    copy = path.parent.with_name(f"kept-{path.parent.name}")
    shutil.copytree(path.parent, copy)
    try:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        yield
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
        copy.rename(path.parent)


def kept_files(root: Path) -> list[Path]:
    return sorted(path for kind in ("runs", "files") for path in (root / kind).rglob("*") if path.is_file())


def test_a_damaged_file_of_the_state_is_told_deletable_and_costs_no_other(kept):
    runs, files = kept.runs(), kept.files()
    told = 0
    for path in kept_files(kept.root):
        content, owner = path.read_bytes(), path.parent.name
        for how, damage in damages(content):
            if damage == content or (how == OVERWRITTEN and path.name.startswith(("content", "document"))):
                continue  # of documents the size is known, no more
            with damaged(path, damage):
                case = f"{path.name} {how}"
                now_runs, now_files = kept.runs(), kept.files()
                assert now_runs.keys() == runs.keys(), case
                assert now_files.keys() == files.keys(), case
                others = {name: one for name, one in (now_runs | now_files).items() if name != owner}
                assert others == {name: one for name, one in (runs | files).items() if name != owner}, case
                shown = (now_runs | now_files)[owner]
                if shown["status"] == "damaged":
                    error = shown["error"] if owner in runs else shown["status_details"]
                    assert "delete it" in error, case
                    assert str(kept.root) not in error, case
                    told += 1
                else:  # only a journal may lose lines without harm: those of a run that is not done are drawn again
                    assert path.name == "journal.jsonl", case
                    assert runs[owner]["status"] == "stopped", case
                kind = RUNS if owner in runs else "/v1/files"
                if owner in runs:
                    assert kept.closed(owner)["status"] == shown["status"], case
                    assert kept.run(owner) == shown, case
                used = {"file_id": owner, "question": "Which code?", **BUDGETS}
                answer = kept.web.post(RUNS, json=used) if owner in files else kept.web.post(f"{RUNS}/{owner}/resume")
                assert (answer.status_code == 409) == (shown["status"] == "damaged"), (case, answer.text)
                assert kept.web.delete(f"{kind}/{owner}").status_code == 200, case
                assert kept.web.get(f"{kind}/{owner}").status_code == 404, case
                assert not path.parent.exists(), case
    assert told > 60
    assert kept.runs() == runs
    assert kept.ask()["status"] == "done"


JUNK = st.sampled_from([None, 1, -1.5, "x", [], {}, [[]], {"x": 1}, True])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_line_of_a_journal_may_be_json_of_any_shape(kept, data):
    done = next(run["id"] for run in kept.runs().values() if run["status"] == "done")
    path = kept.root / "runs" / "public" / done / "journal.jsonl"
    lines = path.read_bytes().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    line = json.loads(lines[number])
    place = line
    key = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(JUNK)
    lines[number] = json.dumps(line).encode()
    runs, owner = kept.runs(), path.parent.name
    with damaged(path, b"\n".join([*lines, b""])):
        now = kept.runs()
        assert {one: run for one, run in now.items() if one != owner} == {
            one: run for one, run in runs.items() if one != owner
        }
        assert kept.closed(owner)["status"] == now[owner]["status"]
        assert now[owner]["status"] in ("done", "damaged")


def test_what_is_damaged_is_logged_once_at_the_start_and_swept_by_its_last_use(tmp_path, caplog):
    with served(tmp_path) as serving:
        run, file, whole = serving.ask(), serving.upload(), serving.ask()
    record, about = tmp_path / "runs/public" / run["id"], tmp_path / "files/public" / file["id"]
    (record / "run.json").write_text("garbage")
    (about / "file.json").write_bytes(b"\xff\xfe")
    (tmp_path / "runs/public/run-aaaaaaaaaaaaaaaaaaaaaaaa").mkdir()
    (tmp_path / "runs/public/stray").touch()
    with caplog.at_level(logging.WARNING), served(tmp_path) as serving:
        wait_for(lambda: "file-" in caplog.text)
        logged = [line.getMessage() for line in caplog.records if "damaged" in line.getMessage()]
        assert sorted(line.split()[0].strip(":") for line in logged) == sorted(
            [run["id"], file["id"], "run-" + "a" * 24]
        )
        assert about.joinpath("content").exists()
        assert serving.runs()[whole["id"]] == whole
        old = time.time() - 200 * HOURS
        for directory in (record, about):
            os.utime(directory, (old, old))
        with caplog.at_level(logging.INFO):
            expire(serving.parts, time.time() - 168 * HOURS)
        assert f"{run['id']} is forgotten: it was last used at" in caplog.text
        assert run["id"] not in serving.runs()
        assert not serving.files()
        assert whole["id"] in serving.runs()


# -- a full disk


class Disk:
    """Takes so many more operations that write; then it is full."""

    def __init__(self, monkeypatch, room: int):
        self.room = room
        for module, name in [
            *((os, name) for name in ("fsync", "mkdir", "link", "replace", "rename")),
            (shutil, "copyfileobj"),
        ]:
            monkeypatch.setattr(module, name, self._limited(getattr(module, name)))

    def _limited(self, operation):
        def limited(*args, **options):
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return operation(*args, **options)

        return limited


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_at_whatever_write_the_disk_is_full_it_is_a_507_and_nothing_else_breaks(tmp_path, monkeypatch, step):
    with served(tmp_path) as serving:
        whole = serving.ask()
        room, were_full, failures = -step, True, set()
        while were_full:
            room, old = room + step, serving.ask()  # another one each time: what is appended makes it longer
            with monkeypatch.context() as patch:
                disk = Disk(patch, room)
                files = {"file": ("a.txt", TEXT.encode())}
                answers = [
                    serving.web.post("/v1/files", files=files),
                    serving.web.post(RUNS, data=FORM, files=files),
                    serving.web.post(RUNS, json=ASK),
                    serving.web.post(f"{RUNS}/{old['id']}/append", json={"text": "More."}),
                ]
                wait_for(lambda: not serving.parts.reader.tasks)
                were_full = disk.room < 0
                assert all(answer.status_code in (200, 507) for answer in answers), [one.text for one in answers]
                for answer in answers:
                    if answer.status_code == 507:
                        failures.add("run" if "id" in answer.json() else refusal(answer))
                    elif "run" in answer.json().get("object", "") and answer is not answers[3]:
                        assert answer.json()["status"] == "done"
                assert serving.runs()[whole["id"]] == whole
                for run in serving.runs().values():
                    assert run["status"] in ("done", "failed")
                    assert run["status"] == "done" or "full" in run["error"]
                    assert serving.closed(run["id"])["status"] == run["status"]
                if were_full:
                    gone = next((run for run in serving.runs() if run not in (whole["id"], old["id"])), None)
                    assert gone is None or serving.web.delete(f"{RUNS}/{gone}").status_code == 200
                    assert gone not in serving.runs()
            for run in serving.runs().values():  # there is room again
                if run["status"] == "failed":
                    assert serving.web.post(f"{RUNS}/{run['id']}/resume").status_code == 200
            wait_for(lambda: not serving.parts.reader.tasks)
            assert {run["status"] for run in serving.runs().values()} == {"done"}
            for run in serving.runs():
                if run != whole["id"]:
                    serving.web.delete(f"{RUNS}/{run}")
            for file in serving.files():
                serving.web.delete(f"/v1/files/{file}")
        assert room > 30
        assert "run" in failures
        assert any("nothing was kept" in failure for failure in failures)
        for run in serving.runs():
            assert serving.web.delete(f"{RUNS}/{run}").status_code == 200
        assert not marked(tmp_path)


def test_a_run_stopped_on_a_full_disk_is_told_to_be_stopped_here_alone_and_is_written_later(tmp_path, monkeypatch):
    with served(tmp_path) as serving:
        record, other = serving.begin(), serving.begin()
        with monkeypatch.context() as patch:
            Disk(patch, 0)
            stopped = serving.web.post(f"{RUNS}/{record.id}/stop")
            assert stopped.status_code == 507
            assert "but does again after a restart" in refusal(stopped)
            assert serving.run(record.id)["status"] == "stopped"
            assert serving.web.delete(f"{RUNS}/{other.id}").status_code == 200
        assert other.id not in serving.runs()
        path = tmp_path / "runs/public" / record.id / "run.json"
        assert json.loads(path.read_bytes())["status"] == "reading"
        serving.parts.runs.write_held()
        assert json.loads(path.read_bytes())["status"] == "stopped"
        assert serving.web.post(f"{RUNS}/{record.id}/stop").status_code == 200


# -- what is deleted is gone


def test_deleting_everything_leaves_no_byte_of_a_document(tmp_path):
    with served(tmp_path) as serving:
        mine = serving.upload()
        files = [("file", ("a.txt", TEXT.encode())), ("file", ("b.txt", TEXT.encode()))]
        assert serving.web.post(RUNS, data=FORM, files=files).json()["documents"] == ["a.txt", "b.txt"]
        serving.web.post(RUNS, data=FORM | {"file_ids": mine["id"]}, files=files[:1])
        run = serving.ask()
        serving.web.post(f"{RUNS}/{run['id']}/append", json={"text": TEXT, "file_ids": [mine["id"]]})
        assert serving.files().keys() == {mine["id"]}  # what a run brought is not a file of its user's
        for path in serving.runs():
            assert serving.web.delete(f"{RUNS}/{path}").json()["deleted"]
        assert {path.name for path in marked(tmp_path)} == {"content"}  # the user's own
        serving.web.delete(f"/v1/files/{mine['id']}")
        assert not marked(tmp_path)


@pytest.mark.parametrize(
    ("form", "second", "status"),
    [
        ({"chunk_tokens": "1"}, b"text", 400),
        ({"question": ""}, b"text", 400),
        ({"file_ids": "file-" + "0" * 24}, b"text", 404),
        ({}, b"\x00\x01", 400),
        ({}, b"", 400),
        ({"model": "other"}, b"text", 404),
    ],
)
def test_documents_of_a_request_that_is_refused_are_not_kept(kept, form, second, status):
    before = marked(kept.root)
    files = [("file", ("a.txt", TEXT.encode())), ("file", ("b.txt", second))]
    refused = kept.web.post(RUNS, data=FORM | form, files=files)
    assert refused.status_code == status, refused.text
    assert marked(kept.root) == before


def test_what_a_killed_server_left_half_done_is_removed_at_the_next_start(tmp_path):
    for name in ("runs/public/.run-" + "a" * 24, "files/public/.file-" + "b" * 24, "brought/public/file-" + "c" * 24):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "content").write_text(TEXT)
    tmp_path.chmod(0o755)
    open_state(tmp_path)
    assert not marked(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


# -- expiry


def test_what_was_used_is_kept_and_the_rest_is_not(tmp_path):
    with served(tmp_path) as serving:
        runs = {name: serving.ask()["id"] for name in ("seen", "followed", "forgotten")}
        files = {name: serving.upload()["id"] for name in ("seen", "read", "forgotten")}
        old = time.time() - 169 * HOURS
        for directory in [*tmp_path.glob("*/public/*")]:
            os.utime(directory, (old, old))
        serving.run(runs["seen"])
        serving.closed(runs["followed"])
        serving.web.get(f"/v1/files/{files['seen']}")
        used = {name: value for name, value in ASK.items() if name != "text"} | {"file_id": files["read"]}
        assert serving.web.post(RUNS, json=used).status_code == 200
        serving.runs(), serving.files()  # a look at the list is no use of all that is in it
        expire(serving.parts, time.time() - 168 * HOURS)
        assert runs["forgotten"] not in serving.runs()
        assert {runs["seen"], runs["followed"]} <= serving.runs().keys()
        assert serving.files().keys() == {files["seen"], files["read"]}


def test_a_run_under_way_never_expires(tmp_path):
    with served(tmp_path) as serving:
        record = serving.begin()
        expire(serving.parts, time.time() + HOURS)
        assert serving.run(record.id)["status"] == "reading"


@pytest.mark.parametrize(
    ("looks", "trusted"),
    [
        ([(0, 0), (600, 600), (1200, 1200)], [True, True, True]),
        ([(0, 0), (600 + 8 * 86400, 600), (1200 + 8 * 86400, 1200)], [True, False, False]),  # ahead for one week
        ([(0, 0), (600 + 8 * 86400, 600), (8 * 86400 + 87600, 87600)], [True, False, True]),  # it ran evenly for a day
        ([(0, 0), (600 + 8 * 86400, 600), (1200, 1200)], [True, False, False]),  # it was ahead for a moment
        ([(0, 0), (600 - 8 * 86400, 600)], [True, True]),  # behind: less is forgotten
        (
            [(8 * 86400, 0), (8 * 86400 + 600, 600)],
            [False, False],
        ),  # nobody was here for a week, or it had jumped before
        ([(3600, 0)], [True]),
        ([(0, 0), (601, 600), (1203, 1200)], [True, True, True]),  # it is corrected all the time
    ],
)
def test_a_clock_that_jumped_forgets_nothing(looks, trusted):
    clock = TrustedClock(0.0, 86400.0)
    assert [clock.is_trusted(wall, steady + 5000.0) for wall, steady in looks] == trusted


# -- servers side by side


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_second_server_on_a_state_directory_is_refused_by_name_before_it_loads_a_model(tmp_path, umask, monkeypatch):
    held = process.hold_state(tmp_path / "state")
    monkeypatch.setattr(process, "open_backend", lambda _: pytest.fail("a model was loaded"))
    other = ServeSettings(model=str(MODEL), state_dir=tmp_path / "state", port=0)
    with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on .*: stop that server, or give"):
        process.run_server(other)
    held.close()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be used .*: give another --state-dir"):
        process.hold_state(tmp_path / "file")


def test_servers_with_default_settings_have_a_directory_each():
    first, second = (ServeSettings(model="m", port=port).state_dir for port in (8000, 8001))
    assert first != second


def test_what_a_server_writes_is_its_owners_alone(tmp_path, umask):
    process.hold_state(tmp_path / "a" / "state").close()
    with served(tmp_path / "a" / "state") as serving:
        serving.ask()
        serving.upload()
    for path in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_run_of_another_model_is_stopped_not_failed_and_continues_with_its_own(tmp_path):
    with served(tmp_path, dtype="float32") as serving:
        whole = serving.ask()
        record = serving.begin()
    with served(
        tmp_path, dtype="float32"
    ) as serving:  # it was interrupted before its first call: any model may take it up
        wait_for(lambda: serving.run(record.id)["status"] == "done")
    path = tmp_path / "runs/public" / whole["id"] / "run.json"
    path.write_text(path.read_text().replace('"status":"done"', '"status":"reading"'))
    with served(tmp_path, dtype="bfloat16") as serving:
        wait_for(lambda: serving.run(whole["id"])["status"] == "stopped")
        assert "serve that one, then resume it" in serving.run(whole["id"])["error"]
    with served(tmp_path, dtype="float32") as serving:
        serving.web.post(f"{RUNS}/{whole['id']}/resume")
        wait_for(lambda: serving.run(whole["id"])["status"] == "done")
        assert serving.run(whole["id"])["answers"] == whole["answers"]


# -- a cap for each key


def test_one_key_cannot_take_all_readings(tmp_path):
    with served(tmp_path, keys=("a", "b"), max_runs=5) as serving:
        parts: Parts = serving.parts
        begun = [serving.begin("a") for _ in range(2)]
        with pytest.raises(ApiError, match="2 documents of this key are being read, which is its share") as refused:
            serving.begin("a")
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "30")
        serving.begin("b")
        asyncio.run(parts.reader.forget(begun[0]))
        serving.begin("a")
        serving.begin("b")
        with pytest.raises(ApiError, match="2 documents of this key"):
            serving.begin("b")
        serving.begin("c")
        with pytest.raises(ApiError, match=r"5 documents are being read, which is the most \(max_runs\)"):
            serving.begin("d")


def test_without_keys_all_readings_are_everybodys(tmp_path):
    with served(tmp_path, max_runs=3) as serving:
        for _ in range(3):
            serving.begin()
        with pytest.raises(ApiError, match=r"3 documents are being read, which is the most \(max_runs\)"):
            serving.begin()
        assert not marked(tmp_path / "brought")
