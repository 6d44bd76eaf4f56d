"""Weights are swapped under way, settings are read as they are written, and the shipped configs load."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from memjax.serve.settings import ServeSettings, read_keys, read_settings
from tests.serve.conftest import serving, wait_for
from tests.tiny_model import tiny_config, write_tiny_model

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "serve").glob("*.yaml"))
ADMIN = {"Authorization": "Bearer admin"}
IDS = {"token_ids": [1, 2, 3], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def swapping(engine, loaded, tmp_path):
    """A server whose engine has its own weights again afterwards."""
    first = engine.weights.current
    with serving(engine, loaded, tmp_path, admin_key="admin") as server:
        yield server
    engine.weights.current = first


def swap(server, directory: Path, **options) -> httpx.Response:
    return server.post("/admin/weights", {"directory": str(directory), **options}, headers=ADMIN)


def test_weights_are_swapped_under_a_request_that_tells_which_drew_each_token(swapping, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=1)
    body = IDS | {"max_tokens": 500, "temperature": 50.0, "seed": 5, "stream": True}
    versions = []

    def read() -> None:
        with httpx.stream("POST", f"{swapping.url}/generate", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith('data: {"sample"'):
                    versions.append(json.loads(line[6:])["weights_version"])

    before = swapping.post("/generate", IDS).json()["samples"][0]
    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: versions)
    assert swap(swapping, other, version=7).json() == {"weights_version": 7}
    thread.join(60)
    after = swapping.post("/generate", IDS).json()["samples"][0]
    assert set(before["weights_versions"]) == {0}
    assert set(after["weights_versions"]) == {7}
    assert before["token_ids"] != after["token_ids"]
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert "memjax_compilations 0.0" in swapping.get("/metrics").text
    assert "memjax_weights_version 7.0" in swapping.get("/metrics").text


def test_a_checkpoint_that_cannot_be_run_leaves_the_weights(swapping, tmp_path):
    smaller = write_tiny_model(tmp_path / "smaller", tiny_config(num_hidden_layers=1))
    for directory, says in [
        (tmp_path / "none", "no checkpoint"),
        (smaller, "another shape"),
        (tmp_path, "config.json"),
    ]:
        answer = swap(swapping, directory)
        assert answer.status_code == 400, answer.text
        assert says in answer.json()["error"]["message"]
    assert swapping.post("/generate", IDS).json()["samples"][0]["weights_versions"][0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_by_the_name_of_their_tensor(swapping, tmp_path, value):
    other = write_tiny_model(tmp_path / "other", seed=1)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name].flat[7] = value
    save_file(tensors, file)
    before = swapping.post("/generate", IDS).json()["samples"][0]
    refused = swap(swapping, other)
    assert refused.status_code == 400
    assert "self_attn.q_proj.weight" in refused.json()["error"]["message"]
    assert swapping.post("/generate", IDS).json()["samples"][0] == before


def test_a_path_or_a_version_that_cannot_be_is_refused(swapping, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert swap(swapping, Path("/" + "a" * 5000)).status_code == 400
    assert swap(swapping, other, version=3).json() == {"weights_version": 3}
    for version in (0, 3, -1, 1 << 31, 10**20):
        assert swap(swapping, other, version=version).status_code == 400, version
    assert swap(swapping, other).json() == {"weights_version": 4}


def test_a_run_continues_with_other_weights_and_is_marked_mixed(swapping, engine, loaded, tmp_path):
    first = engine.weights.current
    generate = engine.generate
    path = "/v1/memory/answers"

    def run_of(server, run_id: str) -> dict:
        return server.get(f"{path}/{run_id}").json()

    def calls(server, run_id: str) -> list[str]:
        lines = map(json.loads, server.get(f"{path}/{run_id}/journal").text.splitlines())
        return [line["digest"] for line in lines if line["type"] == "call"]

    other = write_tiny_model(tmp_path / "other", seed=1)
    body = {"text": "The lamp room door opens with a code. " * 60, "question": "Which code?", "stream": True}
    budgets = {"chunk_tokens": 100, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
    try:
        engine.generate = lambda params, state: (time.sleep(0.005), generate(params, state))[1]
        with httpx.stream("POST", swapping.url + path, json=body | budgets, timeout=60) as response:
            run_id, lines = response.headers["x-memjax-run"], response.iter_lines()
            next(line for line in lines if '"index": 2' in line)
            assert run_of(swapping, run_id)["mixed"] is False
            assert swap(swapping, other).status_code == 200
            next(line for line in lines if '"index": 6' in line)
            swapping.post(f"{path}/{run_id}/stop", {})
    finally:
        engine.generate = generate
    stopped = run_of(swapping, run_id)
    assert (stopped["status"], stopped["mixed"]) == ("stopped", True)
    assert stopped["chunks_read"] >= 7
    made = calls(swapping, run_id)
    later = swapping.post(path, {"text": "Short.", "question": "What?", **budgets}).json()
    assert (later["status"], later["mixed"]) == ("done", False)  # it is of the other weights alone

    swapping.server.should_exit = True
    wait_for(lambda: swapping.parts.reader._loop.is_closed())
    engine.weights.current = first
    with serving(engine, loaded, swapping.settings.state_dir) as again:
        again.post(f"{path}/{run_id}/resume", {})
        wait_for(lambda: run_of(again, run_id)["status"] != "reading")
        resumed = run_of(again, run_id)
        assert (resumed["status"], resumed["mixed"], resumed["error"]) == ("done", True, None)
        assert calls(again, run_id)[: len(made)] == made
        assert len(set(calls(again, run_id))) == len(calls(again, run_id))
        assert resumed["counters"]["replayed_calls"] == len(made)
        again.post(f"{path}/{later['id']}/append", {"text": "More."})
        wait_for(lambda: run_of(again, later["id"])["status"] == "failed")
        assert "identity.weights was" in run_of(again, later["id"])["error"]


def test_weights_are_nobodys_without_the_admin_key(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, admin_key="admin") as server:
        assert server.post("/admin/weights", {"directory": "/"}).status_code == 401
    with serving(engine, loaded, tmp_path) as server:
        assert server.post("/admin/weights", {"directory": "/"}).status_code == 403


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_starts_with_its_command(path):
    assert read_settings(path, {}).model
    assert path.read_text().startswith("# memjax serve --config configs/serve/")


def test_there_are_shipped_configs():
    assert {path.stem for path in CONFIGS} == {"v5e-8", "h200"}


def test_what_is_typed_goes_over_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: a\nport: 1\nslots: 3\n")
    settings = read_settings(file, {"port": 2, "host": None})
    assert (settings.model, settings.port, settings.slots) == ("a", 2, 3)
    with pytest.raises(ValueError, match="slots"):
        read_settings(file, {"slots": 0})
    with pytest.raises(ValueError, match="no model given"):
        read_settings(None, {})
    file.write_text("model: a\nslot: 3\n")
    with pytest.raises(ValueError, match="did you mean slots"):
        read_settings(file, {})


def test_keys_are_typed_or_of_the_environment():
    assert read_keys(["a"], {"MEMJAX_API_KEYS": "b"}) == ("a",)
    assert read_keys(None, {"MEMJAX_API_KEYS": "b, c,"}) == ("b", "c")
    assert read_keys(None, {}) == ()


def test_the_settings_have_fewer_than_24_fields():
    assert len(ServeSettings.model_fields) < 24
