"""The local client end to end: prompts in, completions out, on a tiny random model."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

from memjax.rollout.client import ClientError, Message, Prompt
from memjax.rollout.local import LocalClient
from memjax.rollout.scheduler import Scheduler
from memjax.trajectory import SamplingParams
from tests.rollout.conftest import MAX_LENGTH

_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
async def client(engine, loaded):
    async with LocalClient(engine, loaded.tokenizer, model="tiny") as client:
        yield client


def ask(*parts, shared: int = 0) -> Prompt:
    return Prompt((Message("user", parts),), shared_parts=shared)


def test_nothing_is_compiled_after_warm_up_over_200_requests(engine, loaded, teacher):
    progress, compiled = [], []
    engine.warm_up(lambda done, of: progress.append((done, of)))
    assert progress == [(i + 1, len(progress)) for i in range(len(progress))]
    listener = lambda event, duration, **_: compiled.append(event) if event == _COMPILED else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    scheduler = Scheduler(engine, loaded.tokenizer)
    rng = np.random.default_rng(0)
    jobs = []
    for i in range(200):
        length = int(rng.integers(1, MAX_LENGTH))
        settings = SamplingParams(
            max_tokens=int(rng.integers(1, min(12, MAX_LENGTH - length + 1))),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            top_k=int(rng.choice([0, 40])),
            n=int(rng.integers(1, 3)),
            seed=i,
        )
        prompt = np.concatenate([np.arange(length // 2), rng.integers(0, 256, length - length // 2)]).tolist()
        shared = length // 2 if i % 3 == 0 else 0
        jobs.append((prompt, settings, scheduler.submit(prompt, settings, shared=shared)))
    futures = [future.result(120) for _, _, future in jobs]
    scheduler.swap_weights(jax.tree.map(np.asarray, loaded.params)).result(60)
    scheduler.submit([1, 2, 3], SamplingParams(max_tokens=3)).result(60)
    scheduler.close()
    jax.monitoring.clear_event_listeners()
    assert engine.compilations == 0
    assert compiled == []
    for (prompt, settings, _), completions in list(zip(jobs, futures, strict=True))[::10]:
        for completion in completions:
            expected = teacher(prompt, completion.token_ids, settings.temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_a_prompt_is_rendered_and_its_reply_decoded(client, loaded):
    prompt = ask("the question")
    (completion,) = await client.complete(prompt, SamplingParams(max_tokens=8, seed=1))
    assert completion.prompt_ids.tolist() == loaded.tokenizer.render_prompt(prompt).ids
    assert completion.text == loaded.tokenizer.decode(completion.token_ids)
    assert completion.completion_tokens == len(completion.token_ids) <= 8
    assert client.window == MAX_LENGTH


async def test_shared_parts_save_prefill_and_change_no_token(client):
    parts, params = ("a context that ", "ends so"), SamplingParams(max_tokens=10, seed=3, n=2)
    plain = await client.complete(ask(*parts), params)
    await client.complete(ask(parts[0], "another", shared=1), params)
    shared = await client.complete(ask(*parts, shared=1), params)
    assert shared[0].cached_tokens > 0 == plain[0].cached_tokens
    assert [c.token_ids.tolist() for c in shared] == [c.token_ids.tolist() for c in plain]


async def test_the_same_seed_gives_the_same_reply_alone_and_in_a_crowd(client):
    prompt, params = ask("one of many"), SamplingParams(max_tokens=10, seed=11)
    (alone,) = await client.complete(prompt, params)
    crowd = await asyncio.gather(
        *(client.complete(ask(f"other {i}"), SamplingParams(max_tokens=5 + i)) for i in range(6)),
        client.complete(prompt, params),
    )
    assert crowd[-1][0].token_ids.tolist() == alone.token_ids.tolist()


async def test_a_cancelled_call_frees_its_slots(client):
    calls = [
        asyncio.create_task(client.complete(ask("x"), SamplingParams(max_tokens=40, n=4, temperature=1.0, seed=i)))
        for i in range(3)
    ]
    await asyncio.sleep(0.002)  # long enough to begin, too short to end
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert all(call.cancelled() for call in calls)
    assert len(await client.complete(ask("y"), SamplingParams(max_tokens=3, n=4))) == 4
    assert client.counters.cancelled == 3


async def test_a_prompt_past_the_window_is_refused_and_a_closed_client_says_so(client):
    with pytest.raises(ValueError, match="the window has 96: shorten the prompt or lower max_tokens"):
        await client.complete(ask("word " * 40), SamplingParams(max_tokens=8))
    await client.close()
    with pytest.raises(ClientError, match="closed"):
        await client.complete(ask("z"), SamplingParams(max_tokens=8))


async def test_a_broken_device_fails_the_call_and_not_the_process(engine, loaded, monkeypatch):
    async with LocalClient(engine, loaded.tokenizer, model="tiny") as client:
        with monkeypatch.context() as patch:

            def broken(*_):
                raise RuntimeError("device lost")

            patch.setattr(engine, "generate", broken)
            with pytest.raises(ClientError, match="device lost"):
                await client.complete(ask("a"), SamplingParams(max_tokens=4))
        assert await client.complete(ask("a"), SamplingParams(max_tokens=4))


async def test_a_model_directory_is_loaded_with_a_window_it_was_trained_for(model_directory):
    with pytest.raises(ValueError, match="max_length 5000 is past the model's window of 4096 tokens"):
        LocalClient.load(model_directory, max_length=5000)
    async with LocalClient.load(model_directory, max_length=64, slots=1) as client:
        assert (client.window, client.model) == (64, "model")
