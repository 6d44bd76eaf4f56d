import gzip
import tracemalloc

import pytest

from memjax.data.haystack import BOOKS, Haystack, ends_sentence


def test_words_join_to_the_text_with_white_space_normalised(tmp_path):
    path = tmp_path / "text.txt"
    text = "One  two\n\nthree.\tFour http://example.org/a-very-long-address-indeed 北京" + "长" * 60 + " end"
    path.write_text(text * 2000)
    haystack = Haystack.open([path])
    assert "".join(haystack.words(haystack.size)) == " " + " ".join((text * 2000).split())


def test_a_short_haystack_is_repeated_and_says_so(tmp_path):
    path = tmp_path / "text.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("a b c")
    haystack = Haystack.open([path])
    assert list(haystack.words(7)) == [" a", " b", " c", " a", " b", " c", " a"]
    assert [haystack.readings(count) for count in (1, 3, 4, 7)] == [1, 1, 2, 3]


def test_the_bundled_books_fill_half_a_million_tokens_without_repeating():
    haystack = Haystack.open()
    assert haystack.paths == BOOKS
    assert haystack.size > 400_000


def test_reading_more_takes_no_more_memory():
    def peak(words):
        tracemalloc.start()
        sum(1 for _ in Haystack(BOOKS, size=420_000).words(words))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1)  # what is imported on first use
    assert peak(100_000) < peak(20_000) + 100_000


@pytest.mark.parametrize(
    ("word", "ends"),
    [(" end.", True), (' said."', True), ("吗？", True), (" Mr.", False), (" J.", False), (" no", False), ("?’", True)],
)
def test_sentence_ends_are_told_from_abbreviations(word, ends):
    assert ends_sentence(word) is ends


@pytest.mark.parametrize(
    ("content", "message"), [(b" \n\n", "has no text"), (b"\xff\xfe\xfa", "as UTF-8"), (None, "No such file")]
)
def test_a_file_that_is_no_text_is_named(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.txt.*{message}"):
        Haystack.open([path])


def test_a_truncated_archive_is_named(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(BOOKS[1].read_bytes()[:10_000])
    with pytest.raises(ValueError, match=r"cannot read .*cut\.gz"):
        Haystack.open([path])


def test_a_haystack_needs_a_file():
    with pytest.raises(ValueError, match="at least one"):
        Haystack.open([])
