"""memory_first against chunk_first with eight questions about one document: prefilled tokens and wall time of both.

    uv run python benchmarks/layouts.py MODEL DOCUMENT.txt[.gz] --document-tokens 6000

Each layout is one run of `memjax ask` in a process of its own, greedy, on the first --document-tokens (about four
characters each) of the document. chunk_first puts the chunk before question and memory, so that its prefill serves all
questions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = (
    "Who tells the story?",
    "Which places are named?",
    "Which persons are named?",
    "At what time of the year does it begin?",
    "What does the narrator do for a living?",
    "Which objects matter?",
    "What is the mood at the beginning?",
    "Is anybody in danger?",
)


def measure(layout: str, model: str, document: Path, budgets: list[str]) -> dict[str, float]:
    """Run one layout and say what its calls took."""
    journal = document.with_name(f"{layout}.jsonl")
    command = [sys.executable, "-m", "memjax.cli", "ask", QUESTIONS[0], str(document), "--model", model, "--json"]
    for question in QUESTIONS[1:]:
        command += ["-q", question]
    command += ["--layout", layout, "--journal", str(journal), "--slots", str(len(QUESTIONS)), *budgets]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    counted = report["counters"]
    return {
        "document tokens": report["document_tokens"],
        "chunks": report["chunks"],
        "prompt tokens": counted["prompt_tokens"],
        "prefilled tokens": counted["prompt_tokens"] - counted["cached_tokens"],
        "generated tokens": counted["generated_tokens"],
        "reading seconds": report["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("document", type=Path)
    parser.add_argument("--document-tokens", type=int, default=6000)
    parser.add_argument("--chunk-tokens", type=int, default=2000)
    parser.add_argument("--memory-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    arguments = parser.parse_args()
    raw = arguments.document.read_bytes()
    text = (gzip.decompress(raw) if arguments.document.suffix == ".gz" else raw).decode("utf-8")
    budgets = []
    for name in ("chunk_tokens", "memory_tokens", "answer_tokens"):
        budgets += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "document.txt"
        document.write_text(text[: 4 * arguments.document_tokens], encoding="utf-8")
        layouts = ("memory_first", "chunk_first")
        results = {layout: measure(layout, arguments.model, document, budgets) for layout in layouts}
    print("| | memory_first | chunk_first | ratio |\n|---|---|---|---|")
    for name, first in results["memory_first"].items():
        second = results["chunk_first"][name]
        print(f"| {name} | {first:.0f} | {second:.0f} | {second / first:.2f} |")


if __name__ == "__main__":
    main()
