"""Chunks cover the document, keep their size, and never depend on how the text was cut into pieces."""

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data.chunks import escape_tags, escaped_tags, read_chunks
from memjax.data.documents import Series, open_document
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.rollout.fake import ByteTokenizer

TOKENIZER = ByteTokenizer()
quick = settings(deadline=None, max_examples=60)  # a busy machine is no fault of the code


class Source:
    def __init__(self, pieces):
        self.name = "source"
        self._pieces = pieces

    def pieces(self):
        return iter(self._pieces)


@quick
@given(st.text(), st.integers(16, 40))
def test_chunks_join_to_the_document_within_size_and_end_at_characters(text, size):
    chunks = list(read_chunks(text, TOKENIZER, size))
    assert b"".join(bytes(chunk.ids) for chunk in chunks) == text.encode()
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert 0 < len(chunk.ids) <= size
        assert chunk.start_token == sum(len(before.ids) for before in chunks[:index])
        bytes(chunk.ids).decode()  # raises inside a character
    if chunks:
        assert chunks[-1].document_tokens == len(text.encode())


@quick
@given(st.text(max_size=200), st.integers(1, 4))
def test_truncation_keeps_both_ends_and_says_where_the_rest_begins(text, max_chunks):
    whole = text.encode()
    chunks = list(read_chunks(text, TOKENIZER, 16, max_chunks=max_chunks))
    assert len(chunks) <= max_chunks
    for chunk in chunks:
        assert chunk.document_tokens == len(whole)
        assert b"\xef\xbf\xbd" in whole or "\ufffd" not in TOKENIZER.decode(chunk.ids)
    kept = b"".join(bytes(chunk.ids) for chunk in chunks)
    if len(whole) <= 16 * max_chunks - 3 * max_chunks:
        assert kept == whole
    assert kept[:8] == whole[: min(8, len(kept))] or len(kept) < 16


def test_a_truncated_document_is_its_first_and_last_half():
    text = "".join(f"{i:04d}" for i in range(100))
    first, second = read_chunks(text, TOKENIZER, 40, max_chunks=2)
    assert TOKENIZER.decode(first.ids) == text[:40]
    assert TOKENIZER.decode(second.ids) == text[-40:]
    assert (second.start_token, second.document_tokens) == (360, 400)


def test_the_length_is_estimated_from_the_share_that_was_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Some words in a row. " * 20_000)
    document = open_document([str(path)], tmp_path / "spool")
    estimates = [chunk.document_tokens for chunk in read_chunks(document, TOKENIZER, 10_000)]
    assert all(abs(estimate / 420_000 - 1) < 0.02 for estimate in estimates)
    assert estimates[-1] == 420_000


def test_a_chunk_that_could_not_hold_a_character_is_refused():
    with pytest.raises(ValueError, match="at least 16 tokens, got 15"):
        next(read_chunks("text", TOKENIZER, 15))


TAGS = ("memory", "section")
TAG_TEXT = st.lists(st.sampled_from(["<", "/", "memory", "section", "sections", " ", ">", "x", "\n", "MEM", "ory"]))


@quick
@given(TAG_TEXT, st.lists(st.integers(0, 40)))
def test_neutralising_does_not_depend_on_the_pieces(parts, cuts):
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(escaped_tags(pieces, TAGS)) == escape_tags(text, TAGS)


def test_only_the_prompts_own_tags_are_neutralised():
    text = "<memory> </Memory> < / section > <memory class='x'> <memories> <b> a < b <section"
    assert (
        escape_tags(text, TAGS) == "‹memory> ‹/Memory> ‹ / section > ‹memory class='x'> <memories> <b> a < b ‹section"
    )
    assert escape_tags(text, ()) == text


@quick
@given(st.text(), st.lists(st.integers(0, 40)))
def test_estimated_tokens_give_back_the_text_however_it_streams(text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tokenizer = EstimatedTokenizer()
    streamed = list(tokenizer.encode_stream(text[a:b] for a, b in itertools.pairwise(edges)))
    assert tokenizer.decode(streamed) == text
    assert streamed == tokenizer.encode(text)
    assert len(streamed) == tokenizer.count(text)


def _peak_of_reading(pieces):
    source = Source("A line of text without much news in it.\n" * 1638 for _ in range(pieces))  # of 64 KiB
    tracemalloc.start()
    total = sum(len(chunk.ids) for chunk in read_chunks(source, EstimatedTokenizer(), 5000, tags=TAGS))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > pieces * 15_000
    return peak


def test_memory_does_not_grow_with_the_document():
    assert _peak_of_reading(9) < 1.2 * _peak_of_reading(3) < 4_000_000


@pytest.mark.slow
def test_a_hundred_megabytes_stream_in_a_few():
    assert _peak_of_reading(1600) < 4_000_000


def test_a_document_of_a_series_is_cut_by_itself_and_an_appended_one_leaves_the_others_alone(tmp_path):
    texts = ["The door is green. " * 20, "Short.", "The keeper left in spring. " * 9]
    documents = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
        documents.append(open_document([str(tmp_path / f"{number}.txt")], tmp_path))
    alone = [list(read_chunks(document, ByteTokenizer(), 100)) for document in documents]
    for count in range(1, 4):
        chunks = list(read_chunks(Series(tuple(documents[:count])), ByteTokenizer(), 100))
        assert [chunk.ids for chunk in chunks] == [chunk.ids for part in alone[:count] for chunk in part]
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.start_token for chunk in chunks] == [
            sum(len(c.ids) for c in chunks[:k]) for k in range(len(chunks))
        ]
        assert chunks[-1].document_tokens == sum(len(text) for text in texts[:count])
        assert chunks[0].document_tokens == pytest.approx(chunks[-1].document_tokens, rel=0.1)


def test_only_the_last_chunk_seems_to_end_the_document():
    for length in range(30, 400):
        *before, last = read_chunks("a" * length, ByteTokenizer(), 16)
        assert all(chunk.start_token + len(chunk.ids) < chunk.document_tokens for chunk in before)
        assert last.start_token + len(last.ids) == last.document_tokens == length
