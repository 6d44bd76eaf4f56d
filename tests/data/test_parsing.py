"""Documents are parsed elsewhere, within limits, and are killed when nobody waits for them."""

import threading
import time

import pytest

from memjax.data import parsing
from memjax.data.documents import inspected, open_document
from memjax.data.parsing import ended_with_block


@pytest.fixture
def endless(tmp_path):
    """A page that begins with a word and takes a parser minutes: its comments never end (quadratic in html.parser)."""
    path = tmp_path / "endless.html"
    path.write_text("<html>hello " + "<!--" * 300_000)
    return path


def test_a_page_that_takes_too_long_is_refused_in_a_sentence(endless, monkeypatch):
    monkeypatch.setattr(parsing, "CPU_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"endless.html takes too long to read \(more than 1 CPU-seconds\)"):
        inspected(endless, "endless.html")


def test_a_parser_is_killed_when_the_one_who_waits_for_it_leaves(endless):
    raised = []
    with ended_with_block() as ending:

        def work():
            parsing.ENDING.set(ending)
            try:
                inspected(endless, "endless.html")
            except ValueError as error:
                raised.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        while not ending.running:
            time.sleep(0.01)
        (process,) = ending.running
    thread.join(60)
    assert process.returncode is not None
    assert len(raised) == 1
    assert raised[0].startswith("endless.html was not read to its end: its parser was stopped")


def test_a_reader_that_leaves_early_leaves_no_parser(tmp_path):
    path = tmp_path / "a.html"
    path.write_text("<html>" + "<p>words and words</p>" * 50_000)
    with ended_with_block() as ending:
        pieces = open_document([str(path)], tmp_path / "spool").pieces()
        assert "words" in next(pieces)
        (process,) = ending.running
        pieces.close()
        assert process.returncode is not None
        assert not ending.running
