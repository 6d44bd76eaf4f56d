"""Environments in an episode: each acts once, in its place, and one that hangs or dies is nobody's wrong answer."""

import asyncio
from contextlib import suppress

import pytest

from memjax.environments.environment import Step
from memjax.episodes.acting import EnvironmentFailure
from memjax.episodes.journal import Journal, read_lines
from memjax.episodes.limits import Limits
from memjax.episodes.run import is_own_fault
from memjax.rollout.client import ClientError
from tests.episodes.drive import drive, drive_with, scripted, task


class Counter:
    """Counts what it was told; the reward of a step is its number."""

    def __init__(self, start=0):
        self.start, self.told, self.closed = start, [], 0

    async def reset(self, task, *, seed):
        self.told.append(("reset", seed))
        self.count = self.start
        return Step(f"at {self.count}", actions=("add",))

    async def step(self, action):
        self.told.append(action)
        self.count += 1
        return Step(f"{action} made {self.count}", float(self.count), self.count == 3)

    async def close(self):
        self.closed += 1


def counting(environment, turns=3, seen=None):
    async def agent(task, episode):
        step = await episode.reset(environment)
        for _ in range(turns):
            reply = await episode.chat(step.text, max_tokens=40)
            step = await episode.step(environment, reply.text)
            if seen is not None:
                seen.append(step)
        return step.text

    return agent


def say(prompt, params):
    return f"<{prompt}>"


async def test_an_episode_acts_and_closes_its_environment():
    environment, seen = Counter(), []
    trajectory = await drive(counting(environment, seen=seen), task(), scripted(say))
    assert trajectory.error is None
    assert [step.text for step in seen] == [
        "<at 0> made 1",
        "<<at 0> made 1> made 2",
        "<<<at 0> made 1> made 2> made 3",
    ]
    assert seen[2].terminated
    assert environment.closed == 1
    again = Counter()
    await drive(counting(again), task(), scripted(say))
    assert again.told == environment.told  # the seed too


async def test_a_finished_episode_acts_no_more(tmp_path):
    first, second, seen = Counter(), Counter(), []
    whole = await drive_with(tmp_path / "j", counting(first), task(), scripted(say))
    replayed = await drive_with(tmp_path / "j", counting(second, seen=seen), task(), scripted(say))
    assert replayed.answer == whole.answer
    assert second.told == []
    assert (seen[2].reward, seen[2].terminated) == (3.0, True)
    kinds = [line["type"] for _, _, line in read_lines(tmp_path / "j")]
    assert kinds[2:7] == ["action", "observation", "call", "action", "observation"]


async def broken_off(path, at, start=0, environment=None):
    """An episode whose model fails at call `at`."""
    calls = iter(range(99))

    def reply(prompt, params):
        if next(calls) == at:
            raise OSError("down")
        return say(prompt, params)

    environment = environment or Counter()
    assert "down" in (await drive_with(path, counting(environment), task(), scripted(reply))).error


async def test_a_resumed_episode_brings_its_environment_to_its_place(tmp_path):
    await broken_off(tmp_path / "j", 2)
    environment = Counter()
    whole = await drive(counting(Counter()), task(), scripted(say))
    client = scripted(say)
    resumed = await drive_with(tmp_path / "j", counting(environment), task(), client)
    assert (resumed.answer, resumed.error) == (whole.answer, None)
    assert len(client.prompts) == 1
    assert [told if isinstance(told, str) else told[0] for told in environment.told] == [
        "reset", "<at 0>", "<<at 0> made 1>", "<<<at 0> made 1> made 2>",
    ]  # fmt: skip


async def test_an_environment_that_answers_differently_ends_the_episode(tmp_path):
    await broken_off(tmp_path / "j", 2)
    resumed = await drive_with(tmp_path / "j", counting(Counter(start=5)), task(), scripted(say))
    assert resumed.error == (
        "the environment Counter cannot be resumed: repeated, its reset gave the text 'at 5' instead of 'at 0'; start "
        "over (--fresh), and give the environment `repeatable = False` if this is its nature"
    )
    assert not is_own_fault(resumed.failure)


async def test_an_environment_that_cannot_repeat_starts_over_and_this_is_counted(tmp_path):
    once = Counter()
    once.repeatable = False
    await broken_off(tmp_path / "j", 2, environment=once)
    assert once.told[0][0] == "reset"
    other = Counter(start=5)
    other.repeatable = False
    resumed = await drive_with(tmp_path / "j", counting(other), task(), scripted(say))
    assert resumed.answer.endswith("<at 5> made 6> made 7> made 8")
    assert resumed.counters["environments_started_over"] == 1
    assert len(other.told) == 4


class Remembering(Counter):
    async def step(self, action):
        step = await super().step(action)
        return Step(f"{self.told[1:]}", step.reward)


async def test_another_history_is_another_action(tmp_path):
    """What an environment said after other actions is not taken for what it says now."""

    async def told(first):
        environment, texts = Remembering(), []

        async def agent(task, episode):
            await episode.reset(environment)
            texts.append((await episode.step(environment, first)).text)
            texts.append((await episode.step(environment, "same")).text)
            return ""

        await drive_with(tmp_path / "j", agent, task(), scripted())
        return texts, len(environment.told)

    after_a, after_b = ["['a']", "['a', 'same']"], ["['b']", "['b', 'same']"]
    assert [await told(first) for first in "abab"] == [(after_a, 3), (after_b, 3), (after_a, 0), (after_b, 0)]


async def test_the_action_is_on_disk_before_the_environment_acts(tmp_path, monkeypatch):
    synced, found = [], []
    path = tmp_path / "j"
    whole = Journal._sync

    def sync(self):
        whole(self)
        synced.append(path.stat().st_size)

    class Looking(Counter):
        async def step(self, action):
            *_, last = (line for _, _, line in read_lines(path))
            found.append((last["type"], last["action"], synced[-1] == path.stat().st_size))
            return await super().step(action)

    monkeypatch.setattr(Journal, "_sync", sync)
    await drive_with(path, counting(Looking(), 1), task(), scripted(say))
    assert found == [("action", "<at 0>", True)]


class Hanging(Counter):
    async def step(self, action):
        await asyncio.sleep(60)


class Dying(Counter):
    async def step(self, action):
        raise KeyError("lost")


class Leaving(Counter):
    async def step(self, action):
        raise SystemExit(0)


class Odd(Counter):
    async def step(self, action):
        return "text"


class NotAsync(Counter):
    def step(self, action):
        return Step("x")


class DeadAtOnce(Counter):
    async def reset(self, task, *, seed):
        raise OSError("no server")


def gives(step):
    class Giving(Counter):
        async def step(self, action):
            return step

    return Giving


class BadToClose(Counter):
    async def close(self):
        raise RuntimeError("already closed")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Hanging, "the environment Hanging gave nothing for the action 'go' in 0.01 s"),
        (Dying, "the environment Dying failed at the action 'go': KeyError: 'lost'"),
        (Leaving, "the environment Leaving failed at the action 'go': SystemExit: 0"),
        (Odd, "the environment Odd gave 'text' for the action 'go', which is not a Step"),
        (NotAsync, "the environment NotAsync failed at the action 'go': TypeError: "),
        (DeadAtOnce, "the environment DeadAtOnce failed at its reset: OSError: no server"),
        (gives(Step(None)), "the environment Giving gave Step(text=None"),
        (gives(Step("x", float("nan"))), "the environment Giving gave Step(text='x', reward=nan"),
        (gives(Step("x", "0.5")), "the environment Giving gave Step(text='x', reward='0.5'"),
        (gives(Step("x", actions={1})), "the environment Giving gave Step(text='x', reward=0.0"),
    ],
)
async def test_an_environment_that_hangs_or_dies_is_told_and_is_not_the_agents_fault(kind, sentence):
    environment = kind()

    async def agent(task, episode):
        await episode.reset(environment)
        return (await episode.step(environment, "go", timeout=0.01)).text

    trajectory = await drive(agent, task(), scripted())
    assert trajectory.error.startswith(sentence)
    assert isinstance(trajectory.failure, EnvironmentFailure)
    assert not is_own_fault(trajectory.failure)
    assert environment.closed == 1


async def test_what_closing_raises_spoils_no_answer():
    trajectory = await drive(counting(BadToClose(), 1), task(), scripted(say))
    assert (trajectory.answer, trajectory.error) == ("<at 0> made 1", None)


async def test_an_action_is_a_text():
    async def agent(task, episode):
        await episode.reset(environment)
        return (await episode.step(environment, None)).text

    environment = Counter()
    trajectory = await drive(agent, task(), scripted())
    assert (trajectory.error, len(environment.told)) == ("an action is a str, got None", 1)


async def test_an_episode_that_waits_for_its_environment_is_not_at_fault():
    async def agent(task, episode):
        environment = Hanging()
        await episode.reset(environment)
        return (await episode.step(environment, "go")).text

    trajectory = await drive(agent, task(), scripted(), limits=Limits(episode_seconds=0.05))
    assert "was waiting for scripted or an environment then" in trajectory.error
    assert not is_own_fault(trajectory.failure)


async def test_steps_side_by_side_are_taken_one_after_another_also_when_resumed(tmp_path):
    class Slow(Counter):
        async def step(self, action):
            before = self.count
            await asyncio.sleep(0.01)
            assert self.count == before, "another step was taken in the meantime"
            return await super().step(action)

    def acting(environment, at):
        async def agent(task, episode):
            await episode.reset(environment)
            await episode.step(environment, "a")
            await episode.step(environment, "b")
            if at == "break":
                raise KeyError("broken off")
            steps = await episode.gather(episode.step(environment, "c"), episode.step(environment, "d"))
            return " ".join(step.text for step in steps)

        return agent

    await drive_with(tmp_path / "j", acting(Slow(), "break"), task(), scripted())
    environment = Slow()
    trajectory = await drive_with(tmp_path / "j", acting(environment, "end"), task(), scripted())
    assert (trajectory.error, trajectory.answer) == (None, "c made 3 d made 4")
    assert environment.told[1:] == ["a", "b", "c", "d"]


async def test_a_step_after_others_were_gathered_credits_the_reply_that_it_is_given():
    async def agent(task, episode):
        environment = Counter()
        await episode.reset(environment)
        await episode.chat("before", max_tokens=40)
        _, second = await episode.gather(episode.chat("one", max_tokens=40), episode.chat("two", max_tokens=40))
        await episode.step(environment, "go")
        assert episode.rewards == {}
        await episode.step(environment, "go", reply=second)
        assert episode.rewards == {second.key: 2.0}
        return ""

    assert (await drive(agent, task(), scripted(say))).error is None


async def test_what_failed_is_counted_where_the_agent_goes_on_without():
    async def agent(task, episode):
        environment = Dying()
        await episode.reset(environment)
        for call in (episode.chat("hello", max_tokens=4), episode.step(environment, "go")):
            with suppress(Exception):
                await call
        return "something"

    def down(prompt, params):
        raise ClientError("down")

    trajectory = await drive(agent, task(), scripted(down))
    assert (trajectory.error, trajectory.answer, trajectory.counters["failed_calls"]) == (None, "something", 2)


async def test_an_environment_must_be_reset_first():
    async def agent(task, episode):
        return (await episode.step(Counter(), "go")).text

    trajectory = await drive(agent, task(), scripted())
    assert "was not reset" in trajectory.error
    assert is_own_fault(trajectory.failure)


async def test_the_reward_of_a_step_goes_to_the_last_reply_of_its_own_task():
    given = []

    async def agent(task, episode):
        episode.reward = lambda reply, value: given.append((reply.text, value))

        async def one(name):
            environment = Counter()
            await episode.reset(environment)
            await episode.chat(name, max_tokens=40)
            await asyncio.sleep(0)
            await episode.step(environment, "go")
            await episode.chat(f"{name} again", max_tokens=40)
            await episode.step(environment, "go")

        await episode.gather(one("a"), one("b"))
        return ""

    assert (await drive(agent, task(), scripted(say))).error is None
    assert sorted(given) == [("<a again>", 2.0), ("<a>", 1.0), ("<b again>", 2.0), ("<b>", 1.0)]
