"""Files that are whole whatever happens."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash at any moment leaves either the one before or this one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
