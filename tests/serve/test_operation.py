"""Weights are swapped under way, settings are read as they are written, and the shipped configs load."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

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


def test_the_settings_have_fewer_than_20_fields():
    assert len(ServeSettings.model_fields) < 20
