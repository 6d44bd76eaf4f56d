"""Kind 5: what a document holds comes out, or a sentence says what does not."""

import pytest
from fpdf import FPDF
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data.html_text import HtmlText
from memjax.data.input_files import InputFile, decoded
from memjax.data.pdf_text import PdfText
from tests.data.test_documents import text_of

WORDS = st.lists(st.from_regex(r"[a-z]{2,9}", fullmatch=True), min_size=1, max_size=4).map(" ".join)
METADATA = [
    "<title>{}</title>",
    "<meta charset=utf-8>",
    "<link rel=x>",
    "<style>p {{x: y}}</style>",
    "<script>f()</script>",
]
BLOCKS = [
    "<p>{}</p>",
    "<p>{}",
    "<div>{}</div>",
    "<h1>{}</h1>",
    "<table><tr><td>{}</table>",
    "<main>{}</main>",
    "<ul><li>{}",
]
SILENT = [
    "<svg><text>x</text></svg>",
    "<svg/>",
    "<script>hide()</script>",
    "<template><p>no</p></template>",
    "<!-- no -->",
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_visible_word_of_a_page_comes_out_whatever_is_left_out_of_its_tags(data):
    """HTML lets the tags of html, head and body be omitted, and many ends."""
    said: list[str] = []

    def filled(templates, most):
        chosen = data.draw(st.lists(st.sampled_from(templates), min_size=1, max_size=most))
        for template in chosen:
            if "{}" in template:
                said.append(f"{data.draw(WORDS)} n{len(said)}n")
        texts = iter(said[len(said) - sum("{}" in one for one in chosen) :])
        return "".join(one.format(next(texts)) if "{}" in one else one.format() for one in chosen)

    some = lambda tag: data.draw(st.sampled_from([tag, ""]))  # noqa: E731
    page = "<!doctype html>" + some("<html>") + some("<head>") + filled(METADATA, 3) + some("</head>") + some("<body>")
    page += "".join(filled(BLOCKS, 3) + data.draw(st.sampled_from(SILENT)) for _ in range(3))
    unclosed = data.draw(st.sampled_from(["", "<svg><path>", "<noscript>", "<template>"]))
    page += unclosed + filled(BLOCKS[:1], 2)
    parser = HtmlText()
    parser.feed(page)
    parser.close()
    text = " ".join(parser.take().split())
    lost = [words for words in said if words not in text]
    if unclosed in ("<noscript>", "<template>"):  # a browser shows nothing of it either, and it is told
        assert lost == said[len(said) - len(lost) :]
        assert not lost or f"a {unclosed} that is never closed" in parser.note
    else:
        assert not lost, page
        assert parser.note is None


@settings(max_examples=15, deadline=None)
@given(pages=st.lists(st.one_of(WORDS, st.just("")), min_size=1, max_size=8))
def test_pages_without_text_are_told_by_their_numbers(pages, tmp_path_factory):
    path = tmp_path_factory.mktemp("pdf") / "a.pdf"
    pdf = FPDF()
    for words in pages:
        pdf.add_page()
        pdf.set_font("Helvetica", size=12)
        if words:
            pdf.cell(text=words)
    path.write_bytes(bytes(pdf.output()))
    reader = PdfText(InputFile(path, "a.pdf", "pdf", False, 1, "", 0))
    text = "".join(part for part, _ in reader.pages())
    assert text.split() == " ".join(pages).split()
    empty = sum(not words for words in pages)
    if 0 < empty < len(pages):
        (note,) = reader.notes
        assert note.startswith(f"{empty} of {len(pages)} pages (")
        told = note[note.index("(") + 1 : note.index(")")]
        assert _numbers(told) == [number for number, words in enumerate(pages, 1) if not words]
    else:
        assert reader.notes == []


def _numbers(told: str) -> list[int]:
    numbers = []
    for run in told.split(", "):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def test_words_without_spaces_are_told(tmp_path):
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("Helvetica", size=6)
    for _ in range(30):
        pdf.cell(text="ofthepackageshouldbebrieflyexplained", new_x="LMARGIN", new_y="NEXT")
    (tmp_path / "a.pdf").write_bytes(bytes(pdf.output()))
    reader = PdfText(InputFile(tmp_path / "a.pdf", "a.pdf", "pdf", False, 1, "", 0))
    assert sum(1 for _ in reader.pages()) == 1
    assert reader.notes == ["30 of 30 words are longer than 22 letters: the PDF seems to lack spaces"]


@pytest.mark.parametrize("owner_only", [True, False])
def test_a_pdf_that_only_forbids_printing_opens_and_one_with_a_password_says_so(tmp_path, owner_only):
    pdf = FPDF()
    pdf.set_encryption("owner", "" if owner_only else "user")
    pdf.add_page()
    pdf.set_font("Helvetica", size=12)
    pdf.cell(text="The gardener kept the key.")
    (tmp_path / "a.pdf").write_bytes(bytes(pdf.output()))
    if owner_only:
        assert "gardener" in text_of(tmp_path / "a.pdf")
    else:
        with pytest.raises(ValueError, match=r"a.pdf is protected by a password"):
            text_of(tmp_path / "a.pdf")


LABELS = ["iso-8859-1", "latin1", "us-ascii", "windows-1252", "ISO_8859-1"]
NO_TEXT = ["punycode", "idna", "rot13", "zlib", "hex", "utf-16", "unicode_escape", "undefined", "nonsense"]


@pytest.mark.parametrize("label", LABELS)
def test_a_page_in_latin_1_is_read_as_browsers_read_it(tmp_path, label):
    path = tmp_path / "a.html"
    path.write_bytes(f"<meta charset='{label}'><p>".encode() + b"\x93caf\xe9\x94")
    assert text_of(path).strip() == "“café”"


@pytest.mark.parametrize("label", NO_TEXT)
def test_what_is_no_encoding_of_text_is_not_taken_for_one(tmp_path, label):
    path = tmp_path / "a.html"
    path.write_bytes(f"<meta charset='{label}'><p>naïve-words".encode())
    assert text_of(path).strip() == "naïve-words"


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=8), mark=st.booleans())
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read_with_and_without_a_mark(encoding, text, mark, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(("\ufeff" if mark else "").encode(encoding) + text.encode(encoding))
    file = InputFile(path, "a.txt", "text", False, path.stat().st_size, "", 0)
    assert "".join(part for part, _ in decoded(file)) == text
