"""Two engines under Ray behind one server; `uv sync --extra ray` first."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memjax.rollout.client import ClientError
from memjax.serve.settings import ServeSettings
from memjax.trajectory import SamplingParams
from tests.serve.conftest import running_server, wait_for
from tests.serve.test_tools import ASK, TEMPLATE, tiny_tokenizer
from tests.tiny_model import write_tiny_model

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::Warning")]

IDS = {"token_ids": [1, 2, 3], "max_tokens": 60, "temperature": 50.0, "seed": 3}


@pytest.fixture(scope="module")
def pool(model_directory, tmp_path_factory):
    from memjax.serve.replicas import ReplicaPool

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    environment = {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    options = {"include_dashboard": False, "log_to_driver": False, "runtime_env": {"env_vars": environment}}
    ray.init("local", num_cpus=2, **options)
    settings = ServeSettings(model=str(model_directory), replicas=2, slots=2, max_length=128)
    yield ReplicaPool(settings)
    ray.shutdown()


@pytest.fixture(scope="module")
def server(pool, tmp_path_factory):
    settings = ServeSettings(
        model=pool._settings.model, port=0, state_dir=tmp_path_factory.mktemp("state"), drain_seconds=5
    )
    with running_server(pool, settings, admin_key="admin") as running:
        yield running


def test_a_model_that_cannot_be_loaded_is_told_in_a_sentence(pool, tmp_path):
    from memjax.serve.replicas import ReplicaPool

    with pytest.raises(ValueError, match=str(tmp_path)):
        ReplicaPool(ServeSettings(model=str(tmp_path), replicas=2))


def on_replica(place, action):
    """Run `action(replica)` in the process of a replica."""
    return ray.get(place.actor.__ray_call__.remote(action))


def slow_down(place) -> None:
    """Let the engine of a replica take its time for every step."""

    def slow(replica):  # here, because the replica cannot import this module
        generate = replica._client.engine.generate

        def generate_slowly(params, state):
            time.sleep(0.05)
            return generate(params, state)

        replica._client.engine.generate = generate_slowly

    on_replica(place, slow)


def kill(place) -> None:
    os.kill(on_replica(place, lambda _: os.getpid()), signal.SIGKILL)


def wait_for_both(pool) -> None:
    wait_for(lambda: pool.replicas == 2, 300)


def draw(server, **changes) -> list[int]:
    response = server.post("/generate", IDS | changes)
    assert response.status_code == 200, response.text
    return response.json()["samples"][0]["token_ids"]


def test_requests_are_spread_and_give_what_one_engine_gives(server, pool, engine, loaded):
    from memjax.rollout.local import LocalClient

    with ThreadPoolExecutor(8) as callers:
        replies = list(callers.map(lambda seed: draw(server, seed=seed), range(8)))
    counts = [on_replica(place, lambda replica: replica._client.counters.requests) for place in pool._places]
    assert counts == [4, 4]
    alone = LocalClient(engine, loaded.tokenizer, model="tiny")
    for seed, ids in enumerate(replies):
        params = SamplingParams(max_tokens=60, temperature=50.0, seed=seed)
        assert alone.submit([1, 2, 3], params).result()[0].token_ids.tolist() == ids
    alone.scheduler.close()
    wait_for(lambda: pool.counters.requests == 8)
    assert "memjax_compilations 0.0" in server.get("/metrics").text
    assert "memjax_slots 4.0" in server.get("/metrics").text


def test_tools_and_a_forced_call_reach_the_prompts_of_replicas(server, tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(tmp_path, TEMPLATE)
    monkeypatch.setattr(server.parts.service, "tokenizer", tokenizer)
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = server.post("/tokenize", {"messages": ASK, "tools": tools}).json()["token_ids"]
    opening = [274, *tokenizer.encode('\n{"name":')]  # <tool_call>
    body = {"model": server.parts.service.name, "messages": ASK, "tools": tools, "tool_choice": "required"}
    drawing = {"max_tokens": 8, "seed": 3}
    reply = server.post("/v1/chat/completions", body | drawing).json()
    drawn = server.post("/generate", drawing | {"token_ids": [*ids, *opening]}).json()["samples"][0]["text"]
    assert reply["choices"][0]["message"]["content"] == f'<tool_call>\n{{"name":{drawn}'


def test_a_replica_killed_in_the_middle_is_replaced_and_its_replies_are_whole(server, pool):
    undisturbed = draw(server)
    for place in pool._places:
        slow_down(place)
    events, futures = [], []
    params = SamplingParams(max_tokens=60, temperature=50.0, seed=3)
    for _ in range(2):  # one for each replica
        futures.append(pool.submit([1, 2, 3], params, on_token=events.append))
    wait_for(lambda: len(events) > 10)
    kill(pool._places[0])
    replies = [future.result(300)[0] for future in futures]
    assert [reply.token_ids.tolist() for reply in replies] == [undisturbed] * 2
    assert len(events) == 2 * len(undisturbed)  # no token was given twice, none is missing
    wait_for_both(pool)
    assert draw(server) == undisturbed
    assert server.get("/health").status_code == 200


def test_a_request_that_is_cancelled_leaves_its_slot(pool):
    wait_for_both(pool)
    events = []
    params = SamplingParams(max_tokens=120, temperature=50.0, seed=3)
    futures = [pool.submit([1, 2, 3], params, on_token=events.append) for _ in range(2)]
    wait_for(lambda: len(events) > 2)
    for future in futures:
        future.cancel()
    wait_for(lambda: sum(on_replica(place, lambda replica: replica._client.running) for place in pool._places) == 0)
    assert all(place.samples == 0 for place in pool._places)


def test_what_cannot_fit_is_refused_and_an_engine_that_dies_is_replaced(server, pool):
    assert server.post("/generate", IDS | {"max_tokens": 4000}).status_code == 400
    wait_for_both(pool)

    def break_engine(replica):
        def broken(params, state):
            raise RuntimeError("the device is on fire")

        replica._client.engine.generate = broken

    broken = pool._places[0]
    on_replica(broken, break_engine)
    statuses = set()

    def ask():
        statuses.add(server.post("/generate", IDS).status_code)
        return broken not in pool._places

    wait_for(ask, 60)
    assert statuses <= {200, 503}  # a step that fails fails its requests; the third in a row ends the engine
    wait_for_both(pool)
    assert server.post("/generate", IDS).status_code == 200


def test_other_weights_run_on_every_replica_and_on_one_that_is_started_later(server, pool, tmp_path):
    wait_for_both(pool)
    before = draw(server, temperature=0.0)
    directory = write_tiny_model(tmp_path / "other", seed=1)
    key = {"Authorization": "Bearer admin"}
    assert server.post("/admin/weights", {"directory": "/nowhere"}, headers=key).status_code == 400
    answer = server.post("/admin/weights", {"directory": str(directory), "version": 7}, headers=key)
    assert answer.json() == {"weights_version": 7}
    after = draw(server, temperature=0.0)
    assert after != before
    kill(pool._places[0])
    wait_for(lambda: pool.replicas < 2)
    wait_for_both(pool)
    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(lambda _: draw(server, temperature=0.0), range(4))) == [after] * 4


def test_when_all_replicas_are_gone_requests_wait_for_the_next(pool, server):
    wait_for_both(pool)
    params = SamplingParams(max_tokens=60, temperature=50.0, seed=3)
    expected = pool.submit([1, 2, 3], params).result(300)[0].token_ids.tolist()
    for place in list(pool._places):
        kill(place)
    assert pool.submit([1, 2, 3], params).result(300)[0].token_ids.tolist() == expected


def test_a_pool_that_cannot_replace_its_last_replica_says_so_until_it_can(pool, server):
    wait_for_both(pool)
    directory = Path(pool._settings.model)
    away = directory.rename(directory.with_name("away"))
    for place in list(pool._places):
        kill(place)
    waiting = pool.submit([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(ClientError, match=rf"no replica is alive, .*{directory}"):
        waiting.result(300)
    assert server.get("/health").status_code == 503
    refused = server.post("/generate", IDS)
    assert refused.status_code == 503
    assert "no replica is alive" in refused.text
    away.rename(directory)
    wait_for_both(pool)
    assert server.get("/health").status_code == 200
    assert draw(server)
