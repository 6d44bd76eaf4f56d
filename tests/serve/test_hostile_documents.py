"""A document that takes a parser for ever costs its own reading and nobody else's."""

import threading

import httpx
import pytest

from memjax.data import parsing
from memjax.data.parsing import EVERYBODY
from tests.serve.conftest import serving, wait_for

HOSTILE = b"<html>hello " + b"<!--" * 300_000  # quadratic in html.parser


@pytest.fixture(scope="module")
def server(engine, loaded, tmp_path_factory):
    with serving(engine, loaded, tmp_path_factory.mktemp("state")) as running:
        yield running


def test_an_upload_whose_client_left_is_not_parsed_any_more(server):
    def leave():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/files", files={"file": ("a.html", HOSTILE)}, timeout=1)

    leaving = [threading.Thread(target=leave) for _ in range(3)]
    for thread in leaving:
        thread.start()
    wait_for(lambda: EVERYBODY.running)
    for thread in leaving:
        thread.join()
    wait_for(lambda: not EVERYBODY.running)
    answer = server.post("/v1/memory/answers", {"text": "five words are read here", "question": "q"})
    assert answer.status_code == 200, answer.text
    assert server.get("/v1/files").json()["data"] == []


def test_a_document_that_takes_too_long_is_refused(server, monkeypatch):
    monkeypatch.setattr(parsing, "CPU_SECONDS", 0.2)
    upload = httpx.post(
        f"{server.url}/v1/memory/answers", files={"file": ("a.html", HOSTILE)}, data={"question": "q"}, timeout=60
    )
    assert upload.status_code == 400
    assert "takes too long to read" in upload.json()["error"]["message"]


def test_a_scan_is_told_in_its_file_and_its_run(server):
    from fpdf import FPDF

    pdf = FPDF()
    for text in ("Words on the first page.", "", ""):
        pdf.add_page()
        pdf.set_font("Helvetica", size=12)
        if text:
            pdf.cell(text=text)
    file = httpx.post(f"{server.url}/v1/files", files={"file": ("scan.pdf", bytes(pdf.output()))}).json()
    said = "2 of 3 pages (2-3) hold no text: if they are scans, they need OCR first"
    assert file["warnings"] == [said]
    run = server.post("/v1/memory/answers", {"file_id": file["id"], "question": "q"}).json()
    assert run["warnings"] == [f"scan.pdf: {said}"]
