"""Episodes have bounds, and an agent that blocks the loop is told."""

import asyncio
import json
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from memjax import own_code
from memjax.episodes import watchdog
from memjax.episodes.limits import Limits
from memjax.episodes.run import is_own_fault
from memjax.rollout.client import ClientError
from tests.episodes.drive import drive, scripted, task


async def test_calls_are_bounded_and_every_chunk_that_was_read_allows_as_many_more():
    async def reader(given, episode):
        async for _ in episode.chunks(given.context, 16):
            pass
        for _ in range(given.extra["calls"]):
            await episode.chat("x", max_tokens=4)
        return "done"

    most = 3 * (1 + 2)  # two chunks
    for calls, error in ((most, None), (most + 1, "more than 9 calls (3, and as many for each of the 2 chunks")):
        done = await drive(reader, task("x" * 32, extra={"calls": calls}), scripted(), limits=Limits(calls=3))
        assert (error is None and done.error is None) or error in done.error
        assert (done.failure is None) or is_own_fault(done.failure)


class Slow:
    """A model that replies when it is told to, which is never."""

    model, window = "slow", None

    async def complete(self, prompt, params):
        await asyncio.Event().wait()


async def test_a_reply_that_takes_too_long_is_the_model_s_fault():
    async def asks(given, episode):
        return (await episode.chat("x", max_tokens=4)).text

    done = await drive(asks, task(), Slow(), limits=Limits(call_seconds=0.01))
    assert done.error == "slow gave no reply within limits.call_seconds = 0.01"
    assert isinstance(done.failure, ClientError)


@pytest.mark.parametrize("asks", [True, False])
async def test_seconds_of_an_episode_are_the_fault_of_what_it_was_waiting_for(asks):
    async def agent(given, episode):
        if asks:
            await episode.chat("x", max_tokens=4)
        await asyncio.Event().wait()

    done = await drive(agent, task(), Slow(), limits=Limits(episode_seconds=0.01))
    assert "longer than limits.episode_seconds = 0.01" in done.error
    assert is_own_fault(done.failure) is not asks


async def test_a_timeout_of_the_agent_s_own_stays_its_own():
    async def agent(given, episode):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    done = await drive(agent, task(), scripted(), limits=Limits(episode_seconds=1000))
    assert done.error.startswith("TimeoutError")
    assert isinstance(done.failure, TimeoutError)


@pytest.mark.parametrize("raised", [SystemExit(0), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("beside", [False, True])
async def test_an_agent_that_would_end_the_process_or_its_task_ends_its_episode_only(raised, beside):
    async def leaves(given, episode):
        raise raised

    async def agent(given, episode):
        await (episode.gather(leaves(given, episode)) if beside else leaves(given, episode))

    done = await drive(agent, task(), scripted())
    assert done.error.startswith(f"the agent raised {raised!r}")
    assert is_own_fault(done.failure)


async def test_a_cancellation_that_was_asked_for_passes():
    async def agent(given, episode):
        await asyncio.Event().wait()

    episode = asyncio.create_task(drive(agent, task(), scripted()))
    await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(drive(agent, task(), scripted()), 0.01)


async def test_keys_of_calls_do_not_depend_on_the_bounds():
    async def agent(given, episode):
        return (await episode.chat("x", max_tokens=40)).text

    free, bounded = [
        await drive(agent, task(), scripted(), limits=limits)
        for limits in (Limits(), Limits(call_seconds=99, episode_seconds=99))
    ]
    assert free.answer == bounded.answer  # echo depends on the seed, which depends on the key


async def test_an_agent_that_blocks_is_told_its_line_once(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.2)
    monkeypatch.setattr(watchdog, "_told", set())

    async def blocks(given, episode):
        for _ in range(400):  # until it is told
            if "has blocked" in caplog.text:
                break
            time.sleep(0.05)
        return "done"

    with caplog.at_level(logging.WARNING, watchdog.__name__):
        for _ in range(2):
            assert (await drive(blocks, task(), scripted())).answer == "done"
    assert caplog.text.count("has blocked") == 1
    assert f"{__file__}:" in caplog.text
    assert "asyncio.to_thread" in caplog.text


def stack(*files):
    """A stack of frames in these files, the innermost first."""
    frame = None
    for line, file in reversed([*enumerate(files)]):
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_lineno=line, f_back=frame)
    return frame


OURS = f"{own_code.OURS}tokenizer.py"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["agent.py", OURS], 0),
        (["/v/site-packages/requests.py", "agent.py", OURS], 1),
        ([json.__file__, "<frozen it>", "agent.py", OURS], 2),
        (["/v/site-packages/agent.py", OURS], 0),  # an agent that is installed
        (["environment.py", OURS, "agent.py", OURS], 0),
        (["/v/site-packages/gym.py", "environment.py", OURS, "agent.py", OURS], 1),
        ([OURS, "agent.py", OURS], None),
        (["/v/site-packages/regex.py", OURS, "agent.py", OURS], None),
        ([asyncio.__file__], None),
        ([], None),
    ],
)
def test_only_code_of_the_user_counts_as_blocking(files, line):
    found = watchdog._place({"agent.py", "/v/site-packages/agent.py"}, stack(*files))
    assert found == (None if line is None else (files[line], line))


async def test_the_episodes_of_a_loop_share_a_thread_that_ends_with_them(monkeypatch):
    started = []

    class Counted(threading.Thread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(watchdog.threading, "Thread", Counted)

    async def agent(given, episode):
        await asyncio.sleep(0.01)
        return f"{len(started)} {started[0].is_alive()}"

    done = await asyncio.gather(*(drive(agent, task(), scripted()) for _ in range(50)))
    assert {one.answer for one in done} == {"1 True"}
    started[0].join(timeout=30)
    assert not started[0].is_alive()
    assert (await drive(agent, task(), scripted())).answer == "2 False"  # the first one of another watch


async def test_where_no_thread_can_start_episodes_run_all_the_same(monkeypatch):
    class NoMore(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watchdog.threading, "Thread", NoMore)

    async def agent(given, episode):
        return "done"

    assert (await drive(agent, task(), scripted())).answer == "done"
    assert not watchdog._watches


async def test_an_agent_of_ours_is_not_watched(monkeypatch):
    monkeypatch.setattr(watchdog.threading, "Thread", None)  # which would be called
    with watchdog.watched(OURS):
        pass
    with pytest.raises(TypeError), watchdog.watched("/home/somebody/agent.py"):
        pass
