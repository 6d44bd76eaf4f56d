"""Read a whole book with `memjax ask` and watch what it costs: seconds and resident memory chunk by chunk.

    uv run python benchmarks/read_book.py MODEL BOOK.txt[.gz] --out docs/figures/reading

A fact is put into the middle of the book and asked for. The command runs in a process of its own, as a user would run
it; after each chunk its resident memory is read from /proc. Writes OUT.jsonl (a line per chunk), OUT.journal.jsonl
(every prompt and reply), OUT.svg (with --plot, needs matplotlib), and prints a summary.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

FACT = "The combination that opens the iron safe in the cellar of Briony Lodge is 48213."
QUESTION = "What is the combination that opens the iron safe in the cellar of Briony Lodge?"


def with_fact(book: Path) -> str:
    """The book with FACT as a paragraph of its own, at the paragraph break nearest to the middle."""
    raw = book.read_bytes()
    text = (gzip.decompress(raw) if book.suffix == ".gz" else raw).decode("utf-8")
    middle = text.index("\n\n", len(text) // 2)
    return f"{text[:middle]}\n\n{FACT}{text[middle:]}"


def resident_mib(pid: int, field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"process {pid} has no {field}: it has ended")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(command: list[str], journal: Path, out: Path) -> tuple[list[dict], str]:
    """Run the command; a row per chunk, written as it comes, and what the command printed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rows: list[dict] = []
    started, position, spent = time.monotonic(), 0, 0.0
    with open(out, "w", encoding="utf-8") as file:
        while process.poll() is None:
            time.sleep(0.2)
            if not journal.exists():
                continue
            with open(journal, encoding="utf-8") as lines:
                lines.seek(position)
                while (line := lines.readline()).endswith("\n"):
                    position = lines.tell()
                    record = json.loads(line)
                    if "chunk" not in record or process.poll() is not None:
                        continue
                    reply = record["reply"]
                    before, spent = spent, cpu_seconds(process.pid)
                    row = {
                        "chunk": record["chunk"]["index"],
                        "seconds": reply["seconds"],
                        "cpu_seconds": round(spent - before, 1),  # the first also loads and compiles
                        "prompt_tokens": reply["prompt_tokens"],
                        "memory_tokens": reply["completion_tokens"],
                        "rss_mib": round(resident_mib(process.pid, "VmRSS"), 1),
                        "peak_mib": round(resident_mib(process.pid, "VmHWM"), 1),
                        "elapsed": round(time.monotonic() - started, 1),
                    }
                    rows.append(row)
                    file.write(json.dumps(row) + "\n")
                    file.flush()
    assert process.stdout is not None
    printed = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the reading ended with exit code {process.returncode}")
    return rows, printed


def summary(rows: list[dict], report: dict) -> str:
    """What the run showed, in a few lines."""
    seconds = [row["seconds"] for row in rows]
    steady = [row["cpu_seconds"] for row in rows[1:-1]]  # the first compiles, the last is shorter
    half = len(steady) // 2
    answer = report["answers"][0]
    lines = [
        f"{report['document_tokens']} document tokens in {len(rows)} chunks, {sum(seconds):.0f} s, "
        f"{report['document_tokens'] / sum(seconds):.0f} document tokens/s",
        f"seconds per chunk: median {median(seconds):.1f}, min {min(seconds):.1f}, max {max(seconds):.1f}",
        f"CPU seconds per chunk: first half {mean(steady[:half]):.1f}, second half {mean(steady[half:]):.1f}",
        f"answer: {answer['answer']!r}; last memory {'holds' if '48213' in answer['memory'] else 'lacks'} the fact",
    ]
    for few, many in ((5, 20), (5, len(rows))):
        if len(rows) >= many > few:
            early, late = rows[few - 1]["peak_mib"], rows[many - 1]["peak_mib"]
            growth = f"{early:.0f} / {late:.0f} MiB ({late / early - 1:+.1%})"
            lines.append(f"peak resident memory after {few} / {many} chunks: {growth}")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Seconds and resident memory against document tokens read."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    chunks = [row["chunk"] + 1 for row in rows]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 3.6), sharex=True)
    top.bar(chunks, [row["cpu_seconds"] for row in rows], color="#3b6fb6")
    top.set_ylabel("CPU seconds")
    bottom.plot(chunks, [row["rss_mib"] / 1024 for row in rows], color="#b6503b", linewidth=2)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("resident GiB")
    bottom.set_xlabel("chunk")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chunk-tokens", type=int, default=5000)
    parser.add_argument("--memory-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        book, journal = Path(folder) / "book.txt", arguments.out.with_suffix(".journal.jsonl")
        journal.unlink(missing_ok=True)
        book.write_text(with_fact(arguments.book), encoding="utf-8")
        command = [sys.executable, "-m", "memjax.cli", "ask", QUESTION, str(book), "--model", arguments.model]
        command += ["--chunk-tokens", str(arguments.chunk_tokens), "--memory-tokens", str(arguments.memory_tokens)]
        command += ["--answer-tokens", str(arguments.answer_tokens), "--journal", str(journal), "--json"]
        rows, printed = watch(command, journal, arguments.out.with_suffix(".jsonl"))
    print(summary(rows, json.loads(printed)))
    if arguments.plot:
        plot(rows, arguments.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
