"""The real tokenizer of Qwen2.5-Instruct, kept compressed in tests/data."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

_SOURCE = Path(__file__).parent / "data" / "qwen2_5_tokenizer"


def write_qwen_tokenizer(directory: Path) -> Path:
    """Unpack tokenizer.json and tokenizer_config.json into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with gzip.open(_SOURCE / "tokenizer.json.gz") as packed, (directory / "tokenizer.json").open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    shutil.copyfile(_SOURCE / "tokenizer_config.json", directory / "tokenizer_config.json")
    return directory
