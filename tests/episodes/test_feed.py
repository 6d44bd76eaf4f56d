"""Several readers on one document: cut once, none far ahead, and nobody waits for one that left."""

import asyncio
import weakref

import pytest

from memjax.agents.memagent import MemAgent
from memjax.episodes import feed as feed_module
from memjax.episodes.feed import AHEAD, Feed
from tests.episodes.drive import TOKENIZER, drive, scripted, task

TEXT = "".join(f"{i:04} " for i in range(400))  # 2,000 bytes: 20 chunks of 100


class Counted:
    """A text that says how much of it was read, and how often."""

    name = "counted"

    def __init__(self, text=TEXT, fails_at=None):
        self.text, self.passes, self.read, self.fails_at = text, 0, 0, fails_at

    def pieces(self):
        self.passes += 1
        for start in range(0, len(self.text), 50):
            if self.fails_at is not None and start >= self.fails_at:
                raise ValueError("the file is damaged")
            self.read = start + 50
            yield self.text[start : start + 50]


async def take(feed, reader, count=None, *, slowly=0):
    taken = []
    async for chunk in feed.read(reader, 100, (), None):
        taken.append(chunk)
        for _ in range(slowly):
            await asyncio.sleep(0.001)
        if count is not None and len(taken) == count:
            break
    return taken


def texts(chunks):
    return "".join(TOKENIZER.decode(chunk.ids) for chunk in chunks)


async def test_readers_of_one_pass_share_it_and_the_fastest_waits(monkeypatch):
    monkeypatch.setattr(feed_module, "_TOKENS_PER_CUT", 1)
    source, readers = Counted(), [object() for _ in range(3)]
    feed = Feed(source, TOKENIZER, len(readers))
    at = [0, 0, 0]

    async def read(number, slowly):
        async for chunk in feed.read(readers[number], 100, (), None):
            at[number] = chunk.index
            assert chunk.index - min(at) <= AHEAD + 1
            for _ in range(slowly):
                await asyncio.sleep(0)
        at[number] = 1 << 30

    await asyncio.gather(*(read(n, slowly) for n, slowly in enumerate((0, 3, 9))))
    assert source.passes == 1


async def test_a_feed_holds_a_bounded_part_of_the_document(monkeypatch):
    monkeypatch.setattr(feed_module, "_TOKENS_PER_CUT", 1)
    source, slow, fast = Counted(TEXT * 20), object(), object()
    feed = Feed(source, TOKENIZER, 2)
    reading = feed.read(slow, 100, (), None)
    await anext(reading)
    other = asyncio.ensure_future(take(feed, fast))
    await asyncio.sleep(0.05)
    assert not other.done()
    assert source.read <= (AHEAD + 4) * 100
    del reading
    assert texts(await other) == TEXT * 20


async def test_a_reader_that_leaves_early_ends_or_never_begins_holds_nobody_up():
    readers = [object() for _ in range(4)]
    feed = Feed(Counted(), TOKENIZER, len(readers))
    whole, first, nothing, _ = await asyncio.gather(
        take(feed, readers[0]), take(feed, readers[1], 3), take(feed, readers[2], 1), _leaves(feed, readers[3])
    )
    assert texts(whole) == TEXT
    assert (len(first), len(nothing)) == (3, 1)


async def _leaves(feed, reader):
    await asyncio.sleep(0.01)
    feed.leave(reader)


async def test_a_later_pass_waits_for_nobody_and_is_whole():
    source, one, other = Counted(), object(), object()
    feed = Feed(source, TOKENIZER, 2)
    late = asyncio.ensure_future(take(feed, other, slowly=1))
    first = take(feed, one)
    assert texts(await first) == TEXT
    assert texts(await take(feed, one)) == TEXT
    assert texts(await late) == TEXT
    assert source.passes == 2


async def test_readers_with_shared_prompts_stay_side_by_side():
    feed, readers = Feed(Counted(), TOKENIZER, 2), [object(), object()]
    order = []

    async def read(number, slowly):
        async for chunk in feed.read(readers[number], 100, (), None):
            feed.wait_for_each_other()
            order.append(chunk.index)
            for _ in range(slowly):
                await asyncio.sleep(0)

    await asyncio.gather(read(0, 0), read(1, 5))
    pairs = [sorted(order[i : i + 2]) for i in range(2, len(order), 2)]  # the first may run ahead once
    assert all(b - a <= 1 for a, b in pairs)
    assert sorted(order) == sorted([*range(20), *range(20)])


async def test_the_samples_of_a_group_share_one_list_and_never_wait():
    source = Counted()
    feed, readers = Feed(source, TOKENIZER, keep=True), [object() for _ in range(4)]
    slow = asyncio.ensure_future(take(feed, readers[0], slowly=1))
    for reader in readers[1:]:
        assert texts(await take(feed, reader)) == TEXT
        assert texts(await take(feed, reader)) == TEXT  # a second pass too
    assert not slow.done()
    assert texts(await slow) == TEXT
    assert source.passes == 1


async def test_a_fault_of_the_document_comes_to_every_reader():
    feed, readers = Feed(Counted(fails_at=900), TOKENIZER, 3), [object() for _ in range(3)]
    found = await asyncio.gather(*(take(feed, reader) for reader in readers), return_exceptions=True)
    assert [str(error) for error in found] == ["the file is damaged"] * 3


async def test_a_cancelled_reader_loses_no_chunk_of_the_others(monkeypatch):
    monkeypatch.setattr(feed_module, "_TOKENS_PER_CUT", 1)
    feed, readers = Feed(Counted(), TOKENIZER, 2), [object(), object()]
    cancelled = asyncio.ensure_future(take(feed, readers[0], slowly=1))
    other = asyncio.ensure_future(take(feed, readers[1], slowly=1))
    await asyncio.sleep(0.005)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert texts(await other) == TEXT


async def test_what_every_reader_has_had_is_let_go(monkeypatch):
    monkeypatch.setattr(feed_module, "_TOKENS_PER_CUT", 1)
    held = []
    async for chunk in Feed(Counted(), TOKENIZER).read(object(), 100, (), None):
        held.append(weakref.ref(chunk))
        assert sum(ref() is not None for ref in held) <= AHEAD


async def test_an_agent_that_never_reads_holds_nobody_up():
    source = Counted()

    async def reads(given, episode):
        return str(len([chunk async for chunk in episode.chunks(given.context, 100)]))

    async def does_not(given, episode):
        return "nothing"

    feed = Feed(source, TOKENIZER, 2)
    drives = (drive(agent, task(source), scripted(), feed=feed) for agent in (reads, does_not))
    ended = await asyncio.wait_for(asyncio.gather(*drives), 20)
    assert [one.answer for one in ended] == ["20", "nothing"]


async def test_three_questions_on_one_document_cut_it_once_and_answer_as_alone():
    source = Counted()
    feed = Feed(source, TOKENIZER, 3)
    reader = MemAgent(question=100, chunk=100, memory=60, answer=40, layout="chunk_first")
    questions = ["One?", "Two?", "Three?"]
    together = await asyncio.gather(
        *(drive(reader, task(source, question), scripted(), feed=feed) for question in questions)
    )
    assert source.passes == 1
    alone = [await drive(reader, task(TEXT, question), scripted()) for question in questions]
    assert [one.answer for one in together] == [one.answer for one in alone]


async def test_reading_twice_and_leaving_early_are_written_plainly():
    async def agent(given, episode):
        read = []
        for _ in range(2):
            async for chunk in episode.chunks(given.context, 100):
                read.append(chunk.index)
                if chunk.index == 5:
                    break
        return str(read)

    read = await drive(agent, task(TEXT), scripted())
    assert read.answer == str([*range(6), *range(6)])
    assert read.counters["document_tokens"] == 1200


async def test_a_capped_document_loses_its_middle_and_says_how_much():
    async def agent(given, episode):
        return str([chunk.index async for chunk in episode.chunks(given.context, 100, max_chunks=6)])

    capped = await drive(agent, task(TEXT), scripted(), max_chunks=4)
    assert (capped.answer, capped.counters["truncated_tokens"]) == ("[0, 1, 2, 3]", 1600)
    assert (await drive(agent, task(TEXT), scripted())).counters["truncated_tokens"] == 1400


async def test_a_pass_inside_a_pass_leaves_the_outer_one_alone():
    feed, readers = Feed(Counted(), TOKENIZER, 2), [object(), object()]

    async def nested(reader):
        outer, inner = [], []
        async for chunk in feed.read(reader, 100, (), None):
            outer.append(chunk)
            if chunk.index == 2:
                inner = [one async for one in feed.read(reader, 100, (), None)]
        return texts(outer), texts(inner)

    (outer, inner), other = await asyncio.gather(nested(readers[0]), take(feed, readers[1]))
    assert outer == inner == texts(other) == TEXT
