"""Files of every kind become text, and what cannot be read is refused by name before anything is loaded."""

import gzip
import io
import os
import threading

import pytest

from memjax.data.documents import PIECE_BYTES, Document, open_document


def text_of(*paths, spool=None):
    document = open_document([str(path) for path in paths], spool or paths[0].parent / "spool")
    return "".join(document.pieces())


def test_text_comes_out_as_it_is_and_again_on_every_call(tmp_path):
    path = tmp_path / "a.md"
    text = "# Título\n\nnaïve 漢字 🙂\n" * 5000
    path.write_text(text, encoding="utf-8")
    document = open_document([str(path)], tmp_path / "spool")
    assert "".join(document.pieces()) == text
    assert "".join(document.pieces()) == text
    assert document.name == "a.md"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_byte_order_mark_decides_the_encoding(tmp_path, encoding):
    marks = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}
    path = tmp_path / "a.txt"
    path.write_bytes(marks.get(encoding, b"") + "naïve 漢字".encode(encoding))
    assert text_of(path) == "naïve 漢字"


def test_line_ends_of_every_system_become_newlines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (PIECE_BYTES - 1) + b"\r\none\rtwo\nthree")  # a pair astride two pieces is one line end
    assert text_of(path) == "x" * (PIECE_BYTES - 1) + "\none\ntwo\nthree"


def test_several_files_are_announced_by_name_and_order_counts(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("first")
    two.write_text("second")
    assert text_of(one, two) == "first\n\nDocument 2: two.txt\n\nsecond"
    assert text_of(one, two).startswith(text_of(one))  # what follows a file changes nothing in it
    spool = tmp_path / "spool"
    prints = {open_document(list(map(str, files)), spool).fingerprint for files in [(one, two), (two, one), (one,)]}
    assert len(prints) == 3


def test_packed_text_is_unpacked(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"packed words " * 10_000))
    assert text_of(path) == "packed words " * 10_000


def test_html_becomes_its_visible_text(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(
        "<!doctype html><html><head><title>The title</title><style>p {color: red}</style>"
        "<script>if (a < b) hide('<p>')</script></head><body><h1>One &amp; two</h1><p>Some <b>bold</b>\n  words.</p>"
        "<script>more()</script><ul><li>a<li>b</ul><pre>x\n  y</pre>end</body></html>"
    )
    assert text_of(path) == "The title\nOne & two\nSome bold words.\na\nb\nx\n  y\nend"


def test_html_does_not_depend_on_where_pieces_end(tmp_path):
    path = tmp_path / "a.html"
    row = "<p>caf&eacute; <i>au</i> lait</p>\n"
    path.write_text("<html><body>" + row * 10_000)
    assert text_of(path) == "\ncafé au lait" * 10_000 + "\n" or text_of(path).split() == ["café", "au", "lait"] * 10_000


def test_html_in_a_declared_encoding_is_decoded_by_it(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes("<html><head><meta charset='iso-8859-1'></head><body>café</body>".encode("latin-1"))
    assert text_of(path).strip() == "café"


def _pdf(path, pages):
    from fpdf import FPDF

    pdf = FPDF()
    for text in pages:
        pdf.add_page()
        if text:
            pdf.set_font("Helvetica", size=12)
            pdf.cell(text=text)
    pdf.output(str(path))


def test_pdf_gives_its_pages_in_order(tmp_path):
    _pdf(tmp_path / "a.pdf", ["First page.", "Second page."])
    assert text_of(tmp_path / "a.pdf") == "First page.\n\nSecond page.\n\n"


def test_standard_input_is_kept_under_a_name_that_its_content_gives(tmp_path, monkeypatch):
    def piped(text):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return open_document(["-"], tmp_path / "spool").files[0]

    first = piped("piped naïve text")
    assert "".join(Document((first,)).pieces()) == "piped naïve text"
    assert piped("something else").path != first.path
    assert piped("piped naïve text").path == first.path
    with pytest.raises(ValueError, match="standard input is empty"):
        piped("")
    assert len(list((tmp_path / "spool").iterdir())) == 2


def test_a_named_pipe_is_read_once_and_kept(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("from a pipe",))
    writer.start()
    document = open_document([str(pipe)], tmp_path / "spool")
    writer.join()
    assert "".join(document.pieces()) == "".join(document.pieces()) == "from a pipe"


def test_the_share_read_grows_to_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("word " * 100_000)
    shares = [share for _, share in open_document([str(path)], tmp_path / "spool").pieces_with_share()]
    assert shares == sorted(shares)
    assert len(shares) > 3
    assert shares[-1] == 1.0


BAD = {
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b" \n\t\n", "contains no text"),
    "binary.bin": (b"\x7fELF\x02\x01" + bytes(100), "is a binary file \\(byte 0 at offset 6\\)"),
    "office.docx": (b"PK\x03\x04" + b"x" * 100, "is a ZIP or Office file"),
    "latin.txt": ("caf\u00e9 noir".encode("latin-1"), "is not valid UTF-8: byte 0xe9 at offset 3 cannot be decoded"),
    "cut.txt": ("naïve 漢".encode()[:-1], "byte 0xe6 at offset 7"),
    "late.txt": (b"x" * (PIECE_BYTES - 1) + b"\xe6\xbc!", f"byte 0xe6 at offset {PIECE_BYTES - 1}"),
    "marked.txt": (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
    "broken.pdf": (b"%PDF-1.7\nnothing of the kind", "is a damaged or protected PDF"),
    "false.pdf": (b"just text", "is called a PDF but does not start like one"),
    "broken.gz": (gzip.compress(os.urandom(5000))[:2000], "is a damaged gzip file|is a binary file|is not valid"),
    "script.html": (b"<html><script>x()</script></html>", "contains no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_document([str(tmp_path / name)], tmp_path / "spool")
    assert name in str(caught.value)


def test_a_gzip_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"words and words " * 1000)[:-10])
    with pytest.raises(ValueError, match=r"a.txt.gz is a damaged gzip file"):
        open_document([str(path)], tmp_path / "spool")


def test_a_torn_pdf_is_refused_without_further_remarks(tmp_path, caplog):
    _pdf(tmp_path / "a.pdf", ["All of it."])
    content = (tmp_path / "a.pdf").read_bytes()
    (tmp_path / "a.pdf").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is a damaged or protected PDF"):
        text_of(tmp_path / "a.pdf")
    assert not caplog.records


def test_a_pdf_without_text_is_refused_with_a_hint_of_ocr(tmp_path):
    _pdf(tmp_path / "scan.pdf", ["", ""])
    with pytest.raises(ValueError, match="contains no text; a scanned PDF needs OCR"):
        open_document([str(tmp_path / "scan.pdf")], tmp_path / "spool")


def test_names_that_are_no_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*absent\.txt"):
        open_document([str(tmp_path / "absent.txt")], tmp_path / "spool")
    with pytest.raises(ValueError, match="is a directory: name its files"):
        open_document([str(tmp_path)], tmp_path / "spool")
    with pytest.raises(ValueError, match="no document given"):
        open_document([], tmp_path / "spool")
