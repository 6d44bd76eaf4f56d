"""The text of a PDF, page by page, by PDFium (the reader of Chromium)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from memjax.data.input_files import InputFile

_LONG_WORD = re.compile(r"[A-Za-z]{23,}")  # only scripts that put spaces between words
_WORD = re.compile(r"[A-Za-z]+")
_PAGES_NAMED = 20


class PdfText:
    """Reads a PDF once from its first page to its last, and knows afterwards what could not be read."""

    def __init__(self, file: InputFile):
        self._file = file
        self._empty: list[int] = []
        self._pages = self._words = self._long_words = 0

    def pages(self) -> Iterator[tuple[str, float]]:
        """The text of each page with the share (0 to 1) read by then. ValueError for what is no readable PDF."""
        import pypdfium2 as pdfium

        name = self._file.name
        try:
            document = pdfium.PdfDocument(Path(self._file.path))
        except pdfium.PdfiumError as error:
            if "password" in str(error).lower():
                raise ValueError(f"{name} is protected by a password: save it without one") from None
            raise ValueError(f"{name} is a damaged or protected PDF ({error}): save or fetch it again") from None
        self._pages = len(document)
        if not self._pages:
            raise ValueError(f"{name} is a damaged or protected PDF (it has no pages): save or fetch it again")
        for number in range(self._pages):
            try:
                page = document[number]
                text = page.get_textpage().get_text_range()
                page.close()
            except pdfium.PdfiumError as error:
                raise ValueError(f"{name}: the text of page {number + 1} cannot be read ({error})") from None
            text = text.replace("\r\n", "\n").replace("\ufffe", "").replace("\0", "")  # U+FFFE: hyphen at a line's end
            if not text.strip():
                self._empty.append(number + 1)
            self._words += len(_WORD.findall(text))
            self._long_words += len(_LONG_WORD.findall(text))
            yield text + "\n\n", (number + 1) / self._pages

    @property
    def notes(self) -> list[str]:
        """What a person should know of the text, as sentences."""
        said = []
        if 0 < len(self._empty) < self._pages:
            said.append(
                f"{len(self._empty)} of {self._pages} pages ({_ranges(self._empty)}) hold no text: "
                "if they are scans, they need OCR first"
            )
        if self._long_words >= 10 and self._long_words > 0.03 * self._words:
            said.append(
                f"{self._long_words} of {self._words} words are longer than 22 letters: the PDF seems to lack spaces"
            )
        return said


def _ranges(numbers: list[int]) -> str:
    """`2-4, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_PAGES_NAMED])
    return told if len(runs) <= _PAGES_NAMED else f"{told}, ..."
