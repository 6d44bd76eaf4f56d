"""Which model a reply came from: everything that its tokens depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from memjax.whole_file import write_whole


@dataclass(frozen=True)
class ModelIdentity:
    """A model by the hashes of what it is made of. Slots, mesh and address are not part of it.

    A service is known by its name alone; `tokenizer` is None where replies have no ids.
    """

    model: str
    weights: str | None = None
    dtype: str | None = None
    tokenizer: str | None = None  # with its chat template

    @property
    def digest(self) -> str:
        """A hash of all of it; a local model's name is left out, for it may be moved."""
        fields = asdict(self) | ({"model": ""} if self.weights else {})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:24]


def hash_of_files(files: Iterable[Path]) -> str:
    """A hash of names and bytes. A file is read once: its hash is kept by path, size and time of change."""
    kept_in = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memjax" / "file_hashes.json"
    try:
        known: dict[str, str] = json.loads(kept_in.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    found, before = hashlib.sha256(), len(known)
    for file in files:
        stat = file.stat()
        name = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        if name not in known:
            with open(file, "rb") as raw:
                known[name] = hashlib.file_digest(raw, "sha256").hexdigest()
        found.update(f"{file.name} {known[name]}\n".encode())
    if len(known) > before:
        try:
            kept_in.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept_in, json.dumps(known))
        except OSError:
            pass  # hashed again next time
    return found.hexdigest()[:32]
