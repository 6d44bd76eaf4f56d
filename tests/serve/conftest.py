"""A real server on a real socket, in a thread of the test's process, over a tiny random model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from memjax.checkpoint import load_model
from memjax.rollout.engine import Engine, EngineConfig
from memjax.rollout.local import LocalClient, make_engine
from memjax.serve.app import Parts, create_app
from memjax.serve.backend import Backend
from memjax.serve.listening import bind
from memjax.serve.server import Server
from memjax.serve.settings import ServeSettings
from tests.tiny_model import write_tiny_model

SLOTS = 4
WINDOW = 640
EOS = 273  # of the tiny tokenizer


@dataclass(frozen=True)
class Running:
    """A server that runs, and its insides."""

    url: str
    parts: Parts
    server: Server
    settings: ServeSettings

    @property
    def engine(self) -> Engine:
        return self.parts.service.client.engine

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def slots_used(self) -> int:
        return self.parts.service.client.scheduler.running

    def wait_idle(self, seconds: float = 30) -> None:
        wait_for(lambda: not self.slots_used() and not self.parts.service.under_way, seconds)


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def loaded(model_directory):
    return load_model(model_directory)


@pytest.fixture(scope="session")
def engine(loaded) -> Engine:
    """Compiled once; every server has a scheduler of its own over it, one after another."""
    engine = make_engine(loaded, EngineConfig(slots=SLOTS, max_length=WINDOW, prefill_buckets=(128,)))
    engine.warm_up()
    return engine


@contextmanager
def serving(
    engine: Engine, loaded, state_dir: Path, *, keys: Sequence[str] = (), admin_key: str | None = None, **given: Any
) -> Iterator[Running]:
    """A server over an engine, until the end of the block."""
    settings = ServeSettings(model=str(loaded.source), state_dir=state_dir, drain_seconds=5, **{"port": 0, **given})
    client = LocalClient(engine, loaded.tokenizer, model="tiny")
    with running_server(client, settings, keys=keys, admin_key=admin_key) as running:
        yield running


@contextmanager
def running_server(
    client: Backend, settings: ServeSettings, *, keys: Sequence[str] = (), admin_key: str | None = None
) -> Iterator[Running]:
    """A server over any backend, which is closed with it."""
    app = create_app(client, settings, keys=keys, admin_key=admin_key)
    listening = bind(settings.host, settings.port)
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    running = Running(url, app.state.parts, server, settings)
    try:
        wait_for(lambda: running.parts.service.ready, 300)
        yield running
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="module")
def server(engine, loaded, tmp_path_factory) -> Iterator[Running]:
    with serving(engine, loaded, tmp_path_factory.mktemp("state"), admin_key="admin") as running:
        yield running
