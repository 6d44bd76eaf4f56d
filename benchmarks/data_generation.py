"""Time, lengths and memory of making long contexts, as a table.

    python benchmarks/data_generation.py --data /path/to/data --tokenizer model.gguf

The folder holds squad, hotpotqa_dev_distractor_subset and hotpotqa_train_subset. Every row is one run of `python -m
memjax.data` in processes of its own; CPU seconds are those of all of them, memory is that of the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memjax.data.lengths import parse_length
from memjax.data.ruler import ANSWER_TOKENS


def run(name: str, asked: str, arguments: list[str], folder: Path) -> None:
    out = folder / "tasks.jsonl"
    command = [sys.executable, "-m", "memjax.data", *arguments, "--length", asked, "--out", str(out), "--force"]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed")
    seconds = time.monotonic() - start
    with out.open() as file:
        lengths = [json.loads(line)["extra"]["length"] for line in file]
    limit = parse_length(asked)
    print(
        f"| {name} | {limit:,} | {len(lengths)} | {min(lengths):,} to {max(lengths):,} | {min(lengths) / limit:.4f} "
        f"| {seconds:.1f} | {usage.ru_utime + usage.ru_stime:.1f} | {usage.ru_maxrss / 1024:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--ruler-lengths", default="128k", help="with commas between")
    parser.add_argument("--hotpotqa-lengths", default="7k,112k,896k,3.5m", help="with commas between")
    parser.add_argument("--samples", type=int, default=8, help="of each RULER task")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    squad = arguments.data / "squad" / "dev-v1.1.part1.json.gz"
    dev = arguments.data / "hotpotqa_dev_distractor_subset" / "hotpot_dev_distractor_subset.json.gz"
    train = arguments.data / "hotpotqa_train_subset" / "hotpot_train_subset.json.gz"
    common = ["--tokenizer", arguments.tokenizer]
    print("| data | tokens asked | samples | tokens made | least / asked | seconds | CPU seconds | peak RSS, MB |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for length in filter(None, arguments.ruler_lengths.split(",")):
            files = ["--squad", str(squad), "--hotpotqa", str(dev)]
            counts = ["--samples", str(arguments.samples), "--workers", str(arguments.workers)]
            for task in ANSWER_TOKENS:
                run(task, length, ["ruler", "--tasks", task, *files, *counts, *common], Path(folder))
        for length in filter(None, arguments.hotpotqa_lengths.split(",")):
            pool = ["hotpotqa", str(dev), "--distractors", str(train), "--samples", "1", "--workers", "1"]
            run("hotpotqa", length, [*pool, *common], Path(folder))


if __name__ == "__main__":
    main()
