"""Where a task says that its answer stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memjax.trajectory import Task


def passages(task: Task) -> list[tuple[Mapping[str, Any], str]]:
    """Each item of `extra["evidence"]` that says where it stands, with its text.

    An item has its "text", or the characters from "start" to "end" of the context that it takes.
    """
    given = task.extra.get("evidence", ())
    items = [
        item for item in given if isinstance(item, Mapping) and ("text" in item or {"start", "end"} <= item.keys())
    ]
    texts = [item.get("text", "") for item in items]
    at = 0
    for piece in [task.context] if isinstance(task.context, str) else task.context.pieces():
        for index, item in enumerate(items):
            if "text" not in item and item["start"] < at + len(piece) and item["end"] > at:
                texts[index] += piece[max(0, item["start"] - at) : item["end"] - at]
        at += len(piece)
        if all("text" in item or item["end"] <= at for item in items):
            break
    return list(zip(items, texts, strict=True))
