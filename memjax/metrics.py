"""What a run measured, one JSON object a line."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from memjax.whole_file import write_whole


class MetricsLog:
    """The file of a run's metrics, open for its next lines. Close it, or use it in `with`.

    Every line holds `step`. A run that goes on from `step` makes the later ones again, so those lines are dropped.
    """

    def __init__(self, path: Path, step: int = 0):
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept))
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a line; numbers that are none (NaN, infinity) become null, which JSON can hold.

        OSError, and no part of the line, where the disk does not take it.
        """
        row = {name: _plain(value) for name, value in {"step": step, **metrics}.items()}
        line = json.dumps(row).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, if there is one; a last line that a killed process left unfinished is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | bool):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
