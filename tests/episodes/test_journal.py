"""The journal: whole after a kill, refused when it is another's, and told in a sentence whatever is wrong with it."""

import asyncio
import dataclasses
import errno
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from memjax.agents.memagent import MemAgent
from memjax.episodes.episode import Reply, Turn
from memjax.episodes.journal import EpisodeJournal, Journal, JournalError, chunk_pieces, read_lines
from memjax.episodes.packed import packed, packed_lengths, pieces_in, unpacked
from memjax.episodes.recorded import Recording
from memjax.rollout.client import ClientError, Message, Prompt, ToolCall
from memjax.rollout.identity import ModelIdentity, hash_of_files
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams
from tests.episodes.drive import GREEDY, MODEL, TOKENIZER, drive_with, scripted, task
from tests.qwen_tokenizer import write_qwen_tokenizer

READER = MemAgent(question=100, chunk=100, memory=60, answer=40)
TEXT = "".join(f"Line {i} of a text that is not short.\n" for i in range(20))  # 8 chunks of 100 bytes


def lines(path, kind):
    return [line for _, _, line in read_lines(path) if line["type"] == kind]


async def read(path, text=TEXT, client=None, agent=READER, **options):
    client = client or scripted()
    trajectory = await drive_with(path, agent, task(text, question=options.pop("question", "What?")), client, **options)
    return trajectory, len(client.prompts)


async def test_appended_text_an_edit_and_another_question_cost_what_they_must(tmp_path):
    path = tmp_path / "j"
    whole, calls = await read(path)
    assert calls == 9
    assert whole.error is None
    longer, asked = await read(path, TEXT + "x" * 250)
    fresh, straight = await read(tmp_path / "k", TEXT + "x" * 250)
    assert longer.answer == fresh.answer
    assert asked == straight - 7  # 7 full chunks were read before: the last, short one was not
    at = TEXT.index("Line 9")
    _, edited = await read(path, TEXT[:at] + "LINE" + TEXT[at + 4 :])
    assert edited == 9 - at // 100
    _, other = await read(path, question="Who?", name="1")
    assert other == 9
    assert (await read(path, question="Who?", name="1"))[1] == 0


async def test_a_run_that_breaks_off_at_any_call_continues_to_the_same_end(tmp_path):
    straight, _ = await read(tmp_path / "straight")
    for at in range(9):
        calls = iter(range(99))

        def reply(prompt, params, calls=calls, at=at):
            if next(calls) == at:
                raise ClientError("down")
            return scripted()._reply(prompt, params)

        broken, asked = await read(tmp_path / f"{at}", client=scripted(reply))
        assert broken.error == "down"
        resumed, rest = await read(tmp_path / f"{at}")
        assert resumed.answer == straight.answer
        assert (asked, rest) == (at + 1, 9 - at)
        assert resumed.counters["replayed_calls"] == at
        for one, other in zip(resumed.conversations, straight.conversations, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"agent": READER.model_copy(update={"chunk": 90})}, "agent.chunk was 100, is 90"),
        (
            {"agent": READER.model_copy(update={"layout": "chunk_first"})},
            "agent.layout was 'memory_first', is 'chunk_first'",
        ),
        ({"sampling": SamplingParams(temperature=1.0, seed=1)}, "sampling.temperature was 0.0, is 1.0"),
        (
            {"model": ModelIdentity("other", weights="v", dtype="float32", tokenizer="bytes")},
            "identity.weights was 'w', is 'v'",
        ),
        ({"model": ModelIdentity("scripted", weights="w", dtype="bfloat16", tokenizer="bytes")}, "identity.dtype was"),
        ({"text": "Another text. " * 50}, "document.content was"),
    ],
)
async def test_another_run_is_refused_by_what_differs_and_nothing_is_asked_or_lost(tmp_path, changes, field):
    path = tmp_path / "j"
    await read(path)
    before = len(lines(path, "call"))
    refused, asked = await read(path, **changes)
    assert field in refused.error
    assert refused.error.endswith("run it as it was to continue, or name another journal to keep both")
    assert asked == 0
    assert (await read(path))[1] == 0  # the refused drive has left nothing
    assert len(lines(path, "call")) == before
    started_over, asked = await read(path, fresh=True, **changes)
    assert started_over.error is None
    assert asked > 1


async def test_a_run_that_changed_only_its_answer_budget_reads_nothing_again(tmp_path):
    await read(tmp_path / "j")
    _, asked = await read(tmp_path / "j", agent=READER.model_copy(update={"answer": 30}))
    assert asked == 1


async def test_the_seed_of_a_greedy_run_is_not_part_of_its_calls(tmp_path):
    await read(tmp_path / "j")
    again, asked = await read(tmp_path / "j", sampling=SamplingParams(temperature=0.0, seed=99))
    assert (again.error, asked, again.counters["replayed_calls"]) == (None, 0, 9)


async def test_an_edit_costs_side_by_side_calls_only_what_it_changed(tmp_path):
    async def map_reduce(given, episode):
        cut = [TOKENIZER.decode(chunk.ids) async for chunk in episode.chunks(given.context, 100)]
        notes = await episode.gather(*(episode.chat(f"note: {text}", max_tokens=20) for text in cut))
        return (await episode.chat(" ".join(note.text for note in notes), max_tokens=20)).text

    await read(tmp_path / "j", agent=map_reduce)
    edited, asked = await read(tmp_path / "j", "X" + TEXT[1:], agent=map_reduce)  # in the very first chunk
    assert (edited.error, asked) == (None, 2)


async def test_weights_that_change_under_a_run_are_marked_and_taken_up_again_only_by_those_it_had(tmp_path):
    path, other = tmp_path / "j", ModelIdentity("scripted", weights="v", dtype="float32", tokenizer="bytes")
    with Journal(path) as journal:
        part = EpisodeJournal(journal, "0", MODEL, TOKENIZER)
        calls = iter(range(99))

        def reply(prompt, params):
            if next(calls) == 3:
                part.change_model(other)
            return scripted()._reply(prompt, params)

        from memjax.episodes.run import run_episode

        await run_episode(READER, task(TEXT, question="What?"), scripted(reply), TOKENIZER, GREEDY, journal=part)
    begins = lines(path, "begin")
    assert [line["identity"]["weights"] for line in begins] == ["w", "v"]
    assert begins[1]["mixed"]
    assert (await read(path))[1] == 0
    assert (await read(path, model=other))[1] == 0
    third = ModelIdentity("scripted", weights="u", dtype="float32", tokenizer="bytes")
    assert "identity.weights" in (await read(path, model=third))[0].error


async def test_a_torn_last_line_is_dropped_and_told(tmp_path):
    path = tmp_path / "j"
    await read(path)
    whole = path.read_bytes()
    last_call = whole.rindex(b'{"type": "call"')
    path.write_bytes(whole[: last_call + 40])
    with Journal(path) as journal:
        assert journal.was_torn
    assert (await read(path))[1] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"hello\n", "is not a journal of memjax: name another file"),
        (b'{"type": "journal", "version": 99}\n', "was written by another version of memjax (version 2 is read here)"),
        (b'{"memjax": "0.1.0", "settings": {}, "readings": []}\n', "another version of memjax"),
        (b'{\n "memjax": "0.1.0",\n', "another version of memjax"),
        (b'{"question": "q", "reply": "r", "memory": "m"}\n', "another version of memjax"),
        (b'{"made_with": {}}\n', "another version of memjax"),
        (b'{"task": "1", "conversations": []}\n', "another version of memjax"),
        (b"\x00\xff\xfe\n", "is not a journal"),
    ],
)
def test_what_is_not_a_journal_of_this_version_is_refused(tmp_path, content, says):
    is_ours = b'"journal"' in content  # --fresh may empty it
    for end in (content,) if is_ours else (content, content.rstrip(b"\n")):  # one line looks like a torn one
        for fresh in (False,) if is_ours else (False, True):
            (tmp_path / "j").write_bytes(end)
            with pytest.raises(ValueError, match="j ") as caught:
                Journal(tmp_path / "j", fresh=fresh)
            assert says in str(caught.value)
            assert (tmp_path / "j").read_bytes() == end


@pytest.mark.parametrize("garbage", [b"\x00\x01garbage\n", b"[]\n", b'{"type": "call"}\n', b'{"type": "nothing"}\n'])
async def test_garbage_in_the_middle_is_named_by_its_line(tmp_path, garbage):
    path = tmp_path / "j"
    await read(path)
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*before[:5], garbage, *before[5:]]))
    with pytest.raises(ValueError, match=r"j:6 is not a journal line .*: remove the line to continue without it"):
        Journal(path)


def test_a_journal_in_use_names_the_process_that_writes_it(tmp_path):
    with Journal(tmp_path / "j"), pytest.raises(ValueError, match=f"is in use by process {os.getpid()}: wait until"):
        Journal(tmp_path / "j")
    Journal(tmp_path / "j").close()


def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from memjax.episodes.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "j")], stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(ValueError, match=f"process {process.pid}"):
        Journal(tmp_path / "j")
    process.kill()
    process.wait()
    process.stdout.close()
    Journal(tmp_path / "j").close()


async def test_a_full_disk_ends_the_run_and_what_was_read_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "j"

    class Full:
        """A file that takes so many bytes and no more."""

        def __init__(self, file, room):
            self.file, self.room = file, room

        def write(self, data):
            if self.room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room -= written
            return written

        def __getattr__(self, name):
            return getattr(self.file, name)

    with Journal(path) as journal:
        journal._file = Full(journal._file, 5000)
        from memjax.episodes.run import run_episode

        part = EpisodeJournal(journal, "0", MODEL, TOKENIZER)
        full = await run_episode(READER, task(TEXT, question="What?"), scripted(), TOKENIZER, GREEDY, journal=part)
    assert isinstance(full.failure, JournalError)
    assert "cannot be written (No space left on device): what was read is kept; make room" in full.error
    resumed, asked = await read(path)
    straight, _ = await read(tmp_path / "k")
    assert resumed.answer == straight.answer
    assert 0 < asked < 9


async def test_the_file_is_its_owner_s_alone(tmp_path):
    await read(tmp_path / "deep" / "j")
    assert stat.S_IMODE((tmp_path / "deep" / "j").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700


async def test_listeners_hear_every_line_in_order_once_it_is_synced(tmp_path, monkeypatch):
    synced, heard = [], []
    real, fsync_done = os.fsync, threading.Event()

    def fsync(number):
        real(number)
        synced.append(os.fstat(number).st_size)
        fsync_done.set()

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.listen(lambda number, line: heard.append((number, line["type"], synced[-1])))
        from memjax.episodes.run import run_episode

        part = EpisodeJournal(journal, "0", MODEL, TOKENIZER)
        await run_episode(READER, task(TEXT, question="What?"), scripted(), TOKENIZER, GREEDY, journal=part)
    written = list(read_lines(path))[1:]  # the first line came before anybody listened
    assert [(number, kind) for number, kind, _ in heard] == [(number, line["type"]) for number, _, line in written]
    ends = [offset for _, offset, _ in written[1:]] + [path.stat().st_size]
    assert all(size >= end for (_, _, size), end in zip(heard, ends, strict=True))


async def test_a_chunk_is_written_once_and_prompts_name_what_they_repeat(tmp_path):
    path = tmp_path / "j"
    await read(path)
    await read(path, question="Who?", name="1")
    await read(path)
    chunks = lines(path, "chunk")
    assert b"".join(b"".join(chunk_pieces(line)) for line in chunks) == TEXT.encode()
    calls = lines(path, "call")
    assert len(calls) == 18
    parts = [part for part in calls[1]["prompt"][0]["content"] if isinstance(part, dict)]
    assert parts == [{"reply": [1]}, {"chunk": 1}]
    assert len(lines(path, "replay")) == 9


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.load(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")))


def test_a_chunk_comes_back_as_the_ids_that_it_was_cut_to(tmp_path, qwen):
    text = "Naïve 漢字 🙂 and\n\n  code:\tx = {1: 'a'}  <|im_end|> \u200b end"
    ids = qwen.encode(text)
    with Journal(tmp_path / "j") as journal:
        journal.chunk_number(qwen.pieces_of(ids))
    (line,) = lines(tmp_path / "j", "chunk")
    assert qwen.ids_of(chunk_pieces(line)) == ids


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a",
        " ",
        "It's 1 of  two.\n\n\tEnd",
        "Na\u00efve \u6f22\u5b57 \U0001f642\u200b",
        "it" * 300 + " " * 300 + "\u00e9" * 9,
    ],
)
@pytest.mark.parametrize("size", [1, 3, 400])
def test_tokens_are_found_again_in_their_text_wherever_they_are_cut(words, size):
    raw = words.encode()
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert pieces_in(raw, json.loads(json.dumps(packed_lengths(pieces)))) == pieces


@pytest.mark.parametrize(
    ("ids_of", "finish", "is_spelled"),
    [
        (lambda t: [*t.encode("The Seine's 2 \u6f22\u5b57 banks."), t.eos_ids[0]], "stop", True),
        (lambda t: t.encode("cut in the mid"), "length", True),
        (lambda t: [*t.encode("no"), *t.encode("t as it would be encoded")], "length", True),
        (lambda t: t.encode("half a \U00010348")[:-1], "length", False),
        (lambda t: [*t.encode("one"), t.eos_ids[1], *t.encode("two")], "length", False),
        (lambda t: [*t.encode("I "), t.pieces_of(range(t.size)).index(b"<tool_call>")], "length", False),
        (lambda t: [t.eos_ids[0]], "stop", False),
        (lambda t: [], "stop", False),
    ],
)
def test_the_ids_of_a_reply_come_back_whether_its_text_spells_them_or_not(tmp_path, qwen, ids_of, finish, is_spelled):
    ids = np.asarray(ids_of(qwen), np.int32)
    logprobs = -np.random.default_rng(0).exponential(size=len(ids)).astype(np.float32)
    completion = Completion(np.zeros(0, np.int32), ids, logprobs, qwen.decode(ids), finish)
    turn = Turn((1,), "final", Prompt((Message("user", ("Where?",)),)), Reply.of(completion, (1,), qwen.eos_ids))
    identity = dataclasses.replace(MODEL, tokenizer="qwen")
    with Journal(tmp_path / "j") as journal:
        part = EpisodeJournal(journal, "0", identity, qwen)
        part.begin(0, {})
        part.add_turn(dataclasses.replace(turn, digest="d"))
        found = part.find("d")
    (line,) = lines(tmp_path / "j", "call")
    assert ("tokens" in line["reply"]) == is_spelled
    assert found.token_ids.tolist() == ids.tolist()
    assert found.logprobs.tobytes() == logprobs.tobytes()
    assert line["reply"]["text"] == completion.text


@pytest.mark.parametrize("array", [np.arange(-3, 300, dtype=np.int32), np.array([-1e-38, -np.pi], np.float32)])
def test_arrays_survive_the_journal_bit_for_bit(array):
    again = unpacked(json.loads(json.dumps(packed(array))), array.dtype)
    assert again.tobytes() == array.tobytes()


def test_a_file_is_hashed_whole_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(5_000_000))
    file.write_bytes(content)
    first = hash_of_files([file])
    content[2_500_000] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert hash_of_files([file]) != first
    opened = []
    monkeypatch.setattr("builtins.open", lambda *a, **k: opened.append(a) or (_ for _ in ()).throw(AssertionError))
    hash_of_files([file])
    assert opened == []


async def test_a_drive_that_was_stopped_before_its_first_call_ended_can_be_driven_with_other_weights(tmp_path):
    other = ModelIdentity("scripted", weights="other", dtype="float32", tokenizer="bytes")
    with Journal(tmp_path / "j") as journal:
        stopped = EpisodeJournal(journal, "0", MODEL, TOKENIZER)
        stopped.begin(1, {})
        stopped.change_model(other)
    whole, calls = await read(tmp_path / "j", model=MODEL)
    assert (whole.error, calls) == (None, 9)


async def test_a_full_disk_at_the_last_line_is_the_error_of_the_trajectory(tmp_path, monkeypatch):
    def full(self, fields):
        raise JournalError("the disk is full")

    monkeypatch.setattr(EpisodeJournal, "end", full)
    whole, _ = await read(tmp_path / "j")
    assert (whole.answer, whole.error) == ("", "the disk is full")
    assert isinstance(whole.failure, JournalError)


async def test_a_line_removed_by_hand_leaves_the_numbers_of_chunks_alone(tmp_path):
    path = tmp_path / "j"
    await read(path)
    whole = path.read_bytes().splitlines(keepends=True)
    second = next(i for i, line in enumerate(whole) if line.startswith(b'{"type": "chunk", "n": 1,'))
    path.write_bytes(b"".join(whole[:second] + whole[second + 1 :]))
    await read(path, TEXT + "x" * 250)
    numbers = [line["n"] for line in lines(path, "chunk")]
    assert len(set(numbers)) == len(numbers)


def test_a_last_line_without_its_end_counts_where_it_is_whole(tmp_path):
    path = tmp_path / "j"
    turn = '{"type": "demonstration", "episode": "1", "messages": [], "reply": "x"}'
    path.write_text('{"type": "journal", "version": 2}\n' + turn + "\n" + turn)
    assert len(lines(path, "demonstration")) == 2
    with Journal(path) as journal:
        assert not journal.was_torn
    assert len(lines(path, "demonstration")) == 2


async def test_what_is_written_is_synced_within_a_second_and_before_the_end(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(number):
        real(number)
        synced.append(os.fstat(number).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("memjax.episodes.journal._SYNC_SECONDS", 0.05)
    with Journal(tmp_path / "j") as journal:
        for number in range(3):  # a chunk and its call, and then nothing for a long time
            journal.chunk_number([b"%d" % number])
            journal.write({"type": "value", "episode": "0", "key": [number], "digest": f"{number}"})
            written = (tmp_path / "j").stat().st_size
            await asyncio.sleep(0.3)
            assert synced[-1] == written


async def test_numbers_that_are_equal_draw_the_same(tmp_path):
    await read(tmp_path / "j", sampling=SamplingParams(temperature=1, seed=1))
    assert (await read(tmp_path / "j", sampling=SamplingParams(temperature=1.0, seed=1)))[1] == 0
    stopped, asked = await read(tmp_path / "j", sampling=SamplingParams(temperature=1.0, seed=1, stop=("z",)))
    assert ("sampling.stop was" in stopped.error, asked) == (True, 0)


async def test_a_method_is_an_agent_and_arrays_of_other_types_come_back_as_they_were(tmp_path):
    class Own:
        async def work(self, given, episode):
            return (await episode.chat("x", max_tokens=9, key="chunk")).text

    client = scripted()
    complete = client.complete

    async def wide(prompt, params):
        (completion,) = await complete(prompt, params)
        ids, logprobs = completion.token_ids.astype(np.int64), completion.logprobs.astype(np.float64)
        return [dataclasses.replace(completion, token_ids=ids, logprobs=logprobs)]

    client.complete = wide
    first, _ = await read(tmp_path / "j", agent=Own().work, client=client)
    again, asked = await read(tmp_path / "j", agent=Own().work)
    assert (first.error, again.error, asked) == (None, None, 0)
    assert np.array_equal(first.conversations[0].token_ids, again.conversations[0].token_ids)


def test_a_disk_that_does_not_take_the_last_line_is_told_at_the_end(tmp_path, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path / "j")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match="cannot be written"):
        journal.close()


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = ToolCall("1", "search", '{"q": "a"}')
WITH_TOOLS = Prompt(
    (Message("user", ("q",)), Message("assistant", (), (CALL,)), Message("tool", ("r",), (), "1")), 0, (TOOL,)
)


@pytest.mark.parametrize(
    "other",
    [
        replace(WITH_TOOLS, tools=()),
        replace(WITH_TOOLS, messages=(WITH_TOOLS.messages[0], Message("assistant", ()), WITH_TOOLS.messages[2])),
        replace(WITH_TOOLS, messages=(*WITH_TOOLS.messages[:2], Message("tool", ("r",), (), "2"))),
        replace(WITH_TOOLS, messages=(*WITH_TOOLS.messages[:2], Message("tool", ("r",), (), "1", "search"))),
    ],
    ids=["tools", "calls", "which call", "name"],
)
async def test_tools_and_calls_are_in_the_digest_and_come_back(tmp_path, other):
    def asking(prompt):
        async def agent(task, episode):
            return (await episode.chat(prompt, max_tokens=8)).text

        return agent

    async def again(prompt):
        client = scripted()
        await drive_with(tmp_path / "j", asking(prompt), task(), client)
        return len(client.prompts)

    assert [await again(WITH_TOOLS), await again(WITH_TOOLS)] == [1, 0]
    (turn,) = Recording(tmp_path / "j", TOKENIZER).turns("0")
    assert turn.prompt == WITH_TOOLS
    assert turn.reply.completion.prompt_ids.tolist() == TOKENIZER.render(WITH_TOOLS.messages, tools=(TOOL,))
    with Journal(tmp_path / "k") as journal:
        kept = EpisodeJournal(journal, "0", MODEL, TOKENIZER)
        assert kept.digests((1,), "turn", other, GREEDY) != kept.digests((1,), "turn", WITH_TOOLS, GREEDY)
