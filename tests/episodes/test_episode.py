"""Keys do not depend on the order of replies, replays answer what was asked before, and failures end siblings."""

import asyncio
import gc
import random

import numpy as np
import pytest

from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.rollout.client import ClientError, Message, Prompt
from memjax.trajectory import SamplingParams
from tests.episodes.drive import MODEL, TOKENIZER, drive, drive_with, scripted, task


async def branches(given, episode):
    """4 gathered branches of 2 calls, then a nested gather; 47 + 8 calls in all."""

    async def leaf(name):
        return [(await episode.chat(f"leaf {name} {i}", max_tokens=9)).text for i in range(2)]

    async def branch(n):
        head = (await episode.chat(f"branch {n}", max_tokens=9)).text
        leaves = await episode.gather(*(leaf(f"{n}.{i}") for i in range(4)))
        return [head, leaves, (await episode.chat(f"join {n}", max_tokens=9)).text]

    flat = await episode.gather(*(leaf(n) for n in range(4)))
    start = (await episode.chat("start", max_tokens=9)).text
    nested = await episode.gather(*(branch(n) for n in range(4)), width=3)
    tail = await asyncio.gather(*(leaf(f"plain {n}") for n in range(2)))  # without the episode's own gather
    end = await episode.gather(*(episode.chat(f"end {n}", max_tokens=9) for n in range(2)))
    return repr([flat, start, nested, tail, [reply.text for reply in end]])


CALLS = 8 + 1 + 4 * 10 + 4 + 2


class Unordered:
    """A client whose replies arrive in an order of their own."""

    def __init__(self, order):
        self.inner, self.dice = scripted(), random.Random(order)
        self.model, self.window = "scripted", None

    @property
    def prompts(self):
        return self.inner.prompts

    async def complete(self, prompt, params):
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)
        return await self.inner.complete(prompt, params)


def same(a, b):
    assert a.answer == b.answer
    assert a.error is b.error is None
    assert len(a.conversations) == len(b.conversations)
    for one, other in zip(a.conversations, b.conversations, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)


async def test_trajectories_do_not_depend_on_the_order_of_replies():
    sampling = SamplingParams(seed=3)
    runs = [await drive(branches, task(), Unordered(order), sampling=sampling) for order in range(30)]
    assert runs[0].counters["model_calls"] == CALLS
    for other in runs[1:]:
        same(runs[0], other)


@pytest.mark.parametrize("order", range(30))
async def test_a_complete_journal_replays_and_half_of_one_asks_exactly_what_is_missing(tmp_path, order):
    path = tmp_path / "j.jsonl"
    whole = await drive_with(path, branches, task(), Unordered(order))
    again = Unordered(order + 1)
    same(whole, await drive_with(path, branches, task(), again))
    assert again.prompts == []
    lines = path.read_text().splitlines(keepends=True)
    calls = [line for line in lines if '"type": "call"' in line]
    dropped = set(random.Random(order).sample(calls, len(calls) // 2))
    path.write_text("".join(line for line in lines if line not in dropped))
    half = Unordered(order + 2)
    same(whole, await drive_with(path, branches, task(), half))
    assert len(half.prompts) == len(dropped)


async def test_a_key_used_twice_is_an_error():
    async def agent(given, episode):
        await episode.chat("a", max_tokens=1, key="same")
        await episode.chat("b", max_tokens=1, key="same")

    read = await drive(agent, task(), scripted())
    assert read.error == "the key ('same',) was used twice in one episode: give every call a key of its own"


async def test_keys_of_numbers_and_words_have_one_order():
    async def agent(given, episode):
        for key in ("b", 2, (1, "x"), (1, 5), "a", 10):
            await episode.chat(f"{key}", max_tokens=9, key=key, kind=str(key))
        return ""

    read = await drive(agent, task(), scripted())
    assert [c.kind for c in read.conversations] == ["(1, 5)", "(1, 'x')", "2", "10", "a", "b"]


async def test_a_failure_cancels_the_siblings_and_is_the_result():
    ended = []

    async def slow(n):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(n)

    async def fails():
        raise ClientError("the service is down")

    async def agent(given, episode):
        await episode.gather(slow(1), fails(), slow(2))
        return "never"

    read = await drive(agent, task(), scripted())
    assert (read.error, read.answer, sorted(ended)) == ("the service is down", "", [1, 2])


async def test_coroutines_that_never_began_are_closed(recwarn):
    async def fails():
        raise ClientError("down")

    async def waits():
        await asyncio.sleep(60)

    async def agent(given, episode):
        await episode.gather(fails(), waits(), waits(), waits(), width=1)

    assert (await drive(agent, task(), scripted())).error == "down"
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


async def test_no_more_than_width_run_at_a_time():
    running, most = 0, 0

    async def one():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    async def agent(given, episode):
        await episode.gather(*(one() for _ in range(20)), width=4)
        return ""

    await drive(agent, task(), scripted())
    assert most == 4


async def test_seeds_differ_by_call_and_question_and_are_the_same_again():
    async def agent(given, episode):
        for _ in range(3):
            await episode.chat("x", max_tokens=1)
        return ""

    async def seeds(question, seed):
        client = scripted()
        await drive(agent, task(question=question), client, sampling=SamplingParams(seed=seed))
        return [params.seed for params in client.params]

    one = await seeds("One?", 7)
    assert len(set(one)) == 3
    assert await seeds("One?", 7) == one
    assert not set(await seeds("Another?", 7)) & set(one)
    assert not set(await seeds("One?", 8)) & set(one)
    assert None not in await seeds("One?", None)  # a drive without a seed draws one


async def test_a_drive_without_a_seed_repeats_the_one_it_drew(tmp_path):
    async def agent(given, episode):
        return (await episode.chat("x", max_tokens=30)).text + str(episode.random("dice").random())

    first = await drive_with(tmp_path / "j", agent, task(), scripted(), sampling=SamplingParams())
    again = scripted()
    second = await drive_with(tmp_path / "j", agent, task(), again, sampling=SamplingParams())
    assert first.answer == second.answer
    assert again.prompts == []
    other = await drive_with(tmp_path / "k", agent, task(), scripted(), sampling=SamplingParams())
    assert other.answer != first.answer


async def test_an_outside_effect_happens_once(tmp_path):
    happened = []

    def pay(amount):
        happened.append(amount)
        return {"paid": amount}

    async def look(name):
        happened.append(name)

    async def agent(given, episode):
        paid = await episode.call("pay", pay, 5)
        nothing = await episode.call("look", look, "x")
        return f"{paid} {nothing} {(await episode.chat('x', max_tokens=9)).text}"

    first = await drive_with(tmp_path / "j", agent, task(), scripted())
    second = await drive_with(tmp_path / "j", agent, task(), scripted())
    assert first.answer == second.answer
    assert happened == [5, "x"]


async def test_a_turn_that_extends_a_conversation_is_part_of_it_and_text_goes_back_as_ids():
    async def agent(given, episode):
        said = [Message("user", ("hello",))]
        for turn in range(3):
            reply = await episode.chat(said, max_tokens=30, kind="turn")
            said += [Message("assistant", (reply.text,)), Message("user", (f"and {turn}?",))]
        return reply.text

    client = scripted()
    read = await drive(agent, task(), client)
    assert read.error is None
    # The byte tokenizer's template has no end marker, so a prompt repeats a reply without its end id: nothing extends.
    assert read.counters["broken_conversations"] == 2
    assert all(not isinstance(m.content[0], str) for m in client.prompts[2].messages if m.role == "assistant")


async def test_a_log_probability_that_is_not_finite_is_a_failure_of_the_engine():
    client = scripted()
    complete = client.complete

    async def broken(prompt, params):
        (completion,) = await complete(prompt, params)
        completion.logprobs[0] = np.nan
        return [completion]

    client.complete = broken

    async def agent(given, episode):
        return (await episode.chat("x", max_tokens=9)).text

    assert "not finite" in (await drive(agent, task(), client)).error


async def test_whatever_an_agent_raises_is_its_result_and_cancelling_is_not():
    async def wrong(given, episode):
        return 1 / 0

    async def number(given, episode):
        return 7

    async def waits(given, episode):
        await asyncio.sleep(60)

    assert (await drive(wrong, task(), scripted())).error.startswith("ZeroDivisionError: division by zero (/")
    assert "returned int" in (await drive(number, task(), scripted())).error
    running = asyncio.ensure_future(drive(waits, task(), scripted()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_episode_is_of_no_use_outside_its_agent():
    kept = []

    async def agent(given, episode):
        kept.append(episode)
        return ""

    await drive(agent, task(), scripted())
    with pytest.raises(RuntimeError, match="only inside the agent"):
        await kept[0].chat("x", max_tokens=1)


async def test_untrained_turns_carry_no_loss(tmp_path):
    async def agent(given, episode):
        await episode.chat("a", max_tokens=9, trained=False)
        return (await episode.chat("b", max_tokens=9)).text

    read = await drive(agent, task(), scripted())
    assert [c.loss_mask.sum() > 0 for c in read.conversations] == [False, True]
    assert read.conversations[0].logprobs.sum() == 0


async def test_the_prompts_of_replayed_turns_make_the_same_conversations(tmp_path):
    async def agent(given, episode):
        first = await episode.chat("a", max_tokens=30)
        prompt = Prompt((Message("user", ("go on: ", first.part())),))
        return (await episode.chat(prompt, max_tokens=30, notes={"why": "test"})).text

    live = await drive_with(tmp_path / "j", agent, task(), scripted())
    same(live, await drive_with(tmp_path / "j", agent, task(), scripted()))


async def test_journals_hold_reply_ids_and_log_probabilities_exactly(tmp_path):
    client = scripted()
    complete, given_out = client.complete, []

    async def noisy(prompt, params):
        (completion,) = await complete(prompt, params)
        completion.logprobs[:] = np.random.default_rng(0).normal(size=len(completion.logprobs)) - 5
        given_out.append(completion)
        return [completion]

    client.complete = noisy

    async def agent(given, episode):
        return (await episode.chat("x", max_tokens=30)).text

    turns = []
    await drive_with(tmp_path / "j", agent, task(), client)
    await drive_with(tmp_path / "j", agent, task(), scripted(), on_turn=turns.append)
    (turn,), (completion,) = turns, given_out
    assert turn.replayed
    assert turn.reply.completion.logprobs.dtype == np.float32
    assert np.array_equal(turn.reply.completion.logprobs, completion.logprobs)
    assert np.array_equal(turn.reply.completion.token_ids, completion.token_ids)
    with Journal(tmp_path / "j") as journal:
        assert EpisodeJournal(journal, "0", MODEL, TOKENIZER).find(turn.digest).text == completion.text


async def test_a_failure_without_words_has_its_name_and_one_in_a_group_is_itself():
    async def slow(given, episode):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)

    async def grouped(given, episode):
        async def fails():
            raise ClientError("down")

        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    assert (await drive(slow, task(), scripted())).error == "TimeoutError: "
    assert (await drive(grouped, task(), scripted())).error == "down"


async def test_an_agent_gives_turns_rewards_of_their_own(tmp_path):
    async def agent(given, episode):
        first = await episode.chat("one", max_tokens=9)
        second = await episode.chat("two", max_tokens=9)
        episode.reward(second, 1)
        episode.reward(second, -0.5)
        episode.reward(first, 0)
        return second.text

    live = await drive_with(tmp_path / "j.jsonl", agent, task(), scripted())
    assert live.error is None
    for conversation, step, reward in zip(live.conversations, "12", (0.0, 0.5), strict=True):
        (span,) = conversation.spans
        assert (span.step, span.reward) == (step, reward)
        assert conversation.loss_mask.nonzero()[0].tolist() == list(range(span.start, span.end))
    again = await drive_with(tmp_path / "j.jsonl", agent, task(), scripted())
    assert [c.spans for c in again.conversations] == [c.spans for c in live.conversations]


@pytest.mark.parametrize("value", [float("nan"), "1", None])
async def test_a_reward_of_a_turn_must_be_a_number(value):
    async def agent(given, episode):
        episode.reward(await episode.chat("one", max_tokens=9), value)
        return ""

    assert "a reward must be a finite number" in (await drive(agent, task(), scripted())).error


async def test_what_is_no_prompt_and_what_is_no_json_value_is_told():
    async def dicts(task, episode):
        return (await episode.chat([{"role": "user", "content": "hello"}], max_tokens=4)).text

    async def sets(task, episode):
        return await episode.call("search", lambda: {1, 2})

    assert 'write Message("user", ("text",))' in (await drive(dicts, task(), scripted())).error
    told = (await drive(sets, task(), scripted())).error
    assert told.startswith("the journal keeps the value of search as JSON, which {1, 2} is not")
