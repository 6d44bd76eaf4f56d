"""The visible text of HTML, as it comes."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

_SILENT = frozenset({"script", "style", "template", "noscript", "svg", "head"})
_METADATA = frozenset({"base", "link", "meta", "noscript", "script", "style", "template", "title"})
"""What may stand in a head; anything else ends it, for its end and the body's start need not be written."""
_BLOCKS = frozenset(
    {
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "footer",
        "form",
    }
    | {"h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table"}
    | {"form", "td", "th", "title", "tr", "ul"}
)
_ENDS_SVG = _BLOCKS - {"title"}
"""Blocks do not stand in a drawing: one that was never closed ends before them, as in a browser."""


class HtmlText(HTMLParser):
    """Collects the visible text; blocks become lines, runs of white space one space (except in pre)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._last = "\n"
        self._silent: list[str] = []  # the silent elements that are open, and how many of each
        self._open: Counter[str] = Counter()
        self._left_out = 0  # characters since the outermost of them
        self._pre = 0

    def take(self) -> str:
        """What was collected since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    @property
    def note(self) -> str | None:
        """What was left out because an element was never closed."""
        if not self._left_out or not self._silent:
            return None
        return f"the {self._left_out} characters after a <{self._silent[0]}> that is never closed were left out"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        if tag == "body":
            self._close_all()  # whatever was left open in the head
        elif self._silent == ["head"] and tag not in _METADATA and tag not in ("head", "html"):
            self._close_all()
        elif self._silent and self._silent[-1] == "svg" and tag in _ENDS_SVG:
            while self._silent and self._silent[-1] == "svg":
                self._close_last()
        if tag in _SILENT:
            if not self._silent:
                self._left_out = 0
            self._silent.append(tag)
            self._open[tag] += 1
        if tag == "pre":
            self._pre += 1
        if tag in _BLOCKS:
            self._new_line()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<svg/>` opens nothing; of other elements HTML does not heed the slash."""
        self.handle_starttag(tag, attrs)
        if tag == "svg":
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close an element, and what was left open in it."""
        if self._open[tag]:
            while self._close_last() != tag:
                pass
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        if tag in _BLOCKS:
            self._new_line()

    def handle_data(self, data: str) -> None:
        """Take text."""
        if self._silent == ["head"] and data.strip() and self.lasttag != "title":
            self._close_all()  # words end a head, as any element does that cannot stand in it
        title = self._silent == ["head"] and self.lasttag == "title"
        if self._silent and not title:
            self._left_out += len(data.strip())
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if self._last.isspace():
                data = data.lstrip(" ")
        self._emit(data)

    def _close_last(self) -> str:
        tag = self._silent.pop()
        self._open[tag] -= 1
        return tag

    def _close_all(self) -> None:
        self._silent.clear()
        self._open.clear()

    def _new_line(self) -> None:
        if self._last != "\n":
            self._emit("\n")

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._last = text[-1]
