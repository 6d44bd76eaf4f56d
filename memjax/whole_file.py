"""Files that are whole whatever happens, written at once or line by line, and directories with one writer."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash at any moment leaves either the one before or this one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def append_line(file: IO[bytes], row: Mapping[str, Any]) -> None:
    """Add a JSON line; when this returns it survives a power cut."""
    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def drop_torn_line(file: Path) -> bool:
    """Cut off the half line that a kill in the middle of a write leaves; whether there was one."""
    with file.open("r+b") as lines:
        end = lines.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            lines.seek(start)
            newline = lines.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            lines.truncate(keep)
    return keep < end


def lock_directory(path: Path, advice: str) -> IO[str]:
    """The open lock file of a directory, which holds it until it is closed or this process ends.

    ValueError, which names the process that holds it and ends with `advice`, where one does.
    """
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            raise ValueError(f"{path} is in use by {lock.read() or 'another process'}: {advice}") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
