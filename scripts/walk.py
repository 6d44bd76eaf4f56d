#!/usr/bin/env python3
"""Follow one question through `memjax ask` and one task through training, and say how many places they pass.

    python scripts/walk.py CHECKOUT

CHECKOUT is a directory with memjax/; its packages must be installed. Prints a JSON line for each: the files and
functions of memjax that ran (by sys.setprofile, in every thread), and how often the path moved from one file to
another. Import-time code, comprehensions and lambdas are left out.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Walk:
    """The functions of one package that ran."""

    def __init__(self, package: Path):
        self.package = f"{package}{os.sep}"
        self.functions: set[tuple[str, str]] = set()
        self.moves, self.last = 0, ""

    def result(self) -> dict[str, object]:
        """The counts, and the files."""
        files = sorted({file for file, _ in self.functions})
        return {
            "files": len(files),
            "functions": len(self.functions),
            "moves_between_files": self.moves,
            "names": files,
        }

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, as sys.setprofile wants it."""
        code = frame.f_code
        name, is_function = code.co_qualname, code.co_flags & inspect.CO_OPTIMIZED  # a class's body is no function
        if event != "call" or not is_function or "<" in name.rpartition(".")[2]:
            return
        if not code.co_filename.startswith(self.package):
            return
        file = code.co_filename.removeprefix(self.package)
        self.functions.add((file, name))
        self.moves += file != self.last
        self.last = file


@contextmanager
def walking(package: Path) -> Iterator[Walk]:
    """Watch every thread inside."""
    walk = Walk(package)
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def ask(scratch: Path, model: Path) -> None:
    """One question on three chunks with the bundled model."""
    from typer.testing import CliRunner

    from memjax.cli import app
    from memjax.data.tiny import BUDGETS, TinyTasks

    task = TinyTasks(min_chunks=3, max_chunks=3, seed=5).task(0)
    (scratch / "text.txt").write_text(str(task.context))
    budgets = [word for name, n in BUDGETS.items() for word in (f"--{name}-tokens", str(n))]
    command = [
        "ask",
        task.question,
        str(scratch / "text.txt"),
        "--model",
        str(model),
        "--prompts",
        str(model / "prompts"),
    ]
    result = CliRunner().invoke(app, [*command, *budgets])
    assert result.exit_code == 0, result.output


def train(scratch: Path, model: Path) -> None:
    """One step of reinforcement learning on one task, two samples."""
    from typer.testing import CliRunner

    from memjax.data.tiny import BUDGETS
    from memjax.train.__main__ import app

    reader = {f"agent.{name}": n for name, n in BUDGETS.items()} | {"agent.prompts": model / "prompts"}
    keys = {
        "out": scratch / "run", "model": model, "steps": 1, "data.tiny.max_chunks": 2, "rollout.groups": 1,
        "rollout.samples": 2, "rollout.slots": 2, "rollout.max_length": 64, "batch.row_tokens": 64,
        "batch.micro_batch_tokens": 128, "batch.optimizer_steps": 1, "objective.dynamic_sampling": "false",
        "compute.dtype": "float32", "compute.scan_layers": "false", **reader,
    }  # fmt: skip
    (scratch / "empty.yaml").write_text("{}\n")
    settings = [f"{name}={value}" for name, value in keys.items()]
    result = CliRunner().invoke(app, ["run", "--config", str(scratch / "empty.yaml"), *settings])
    assert result.exit_code == 0, result.output


def main() -> None:
    """Walk through both."""
    checkout = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(checkout))
    package = checkout / "memjax"
    walks: list[Callable[[Path, Path], None]] = [ask, train]
    for walk_through in walks:
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"] = scratch
            with walking(package) as walk:
                walk_through(Path(scratch), package / "assets" / "tiny")
        print(json.dumps({"walk": walk_through.__name__, **walk.result()}), flush=True)


if __name__ == "__main__":
    main()
