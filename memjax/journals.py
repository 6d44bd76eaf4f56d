"""`memjax journal`: the journals that `memjax ask` keeps, where they are, and how long."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memjax.data.documents import Document
from memjax.episodes.recorded import Recording
from memjax.rewards.answers import extract_answer

KEPT_DAYS = 30


def journal_directory() -> Path:
    """Where journals are kept of which nobody said where."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "memjax" / "journals"


def journal_path(document: Document, agent: str, model: str, question: str) -> Path:
    """The journal of a question: the same files, agent, model and question find it again."""
    files = [str(file.path.absolute()) for file in document.files]
    named = str(Path(model).absolute()) if Path(model).exists() else model
    digest = hashlib.sha256("\n".join([*files, agent, named, question]).encode("utf-8", "replace")).hexdigest()[:12]
    stem = re.sub(r"\W+", "-", document.files[0].path.stem).strip("-")[:40] or "document"
    return journal_directory() / f"{stem}-{digest}.jsonl"


def expire(now: float | None = None) -> None:
    """Remove what was not used for `KEPT_DAYS` days."""
    before = (time.time() if now is None else now) - KEPT_DAYS * 86_400
    for path in journal_directory().glob("*"):
        if path.stat().st_mtime < before:
            path.unlink(missing_ok=True)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look after the journals of `memjax ask`: every call it made, so that the same command continues where it "
    f"stopped. They lie in {journal_directory()} and go {KEPT_DAYS} days after their last use.",
)
Named = Annotated[list[Path], typer.Argument(metavar="JOURNAL...", help="Journal files, as `list` names them.")]


@app.command("list")
def list_journals() -> None:
    """List the journals, the last used first."""
    table = Table("journal", "question", "model", "calls", "status", "kB", box=None)
    paths = sorted(journal_directory().glob("*.jsonl"), key=lambda path: -path.stat().st_mtime)
    for path in paths:
        try:
            for one in Recording(path).episodes.values():
                asked, model = one.begin.get("question", "")[:60], one.begin.get("identity", {}).get("model", "")
                size = f"{path.stat().st_size / 1000:.0f}"
                table.add_row(path.name, escape(asked), escape(model), str(len(one.digests)), escape(one.status), size)
        except ValueError as error:
            table.add_row(path.name, "", "", "", escape(f"damaged: {error}"), f"{path.stat().st_size / 1000:.0f}")
    _console().print(table if paths else f"there are no journals in {journal_directory()}")


@app.command()
def show(journals: Named) -> None:
    """Print what was asked and answered, and with which model, agent and document."""
    console = _console()
    for path in _found(journals):
        for name, one in Recording(path).episodes.items():
            shown = {"journal": path, "episode": name, "status": f"{one.status}, {len(one.digests)} calls"}
            shown |= {
                field: one.begin.get(field) for field in ("question", "document", "identity", "agent", "sampling")
            }
            if one.end and not one.end.get("error"):
                shown["answer"] = extract_answer(one.end["answer"])
            for field, value in shown.items():
                console.print(f"{field:<9} {value}", highlight=False, markup=False, soft_wrap=True)
            console.print()


@app.command("rm")
def remove(
    journals: Annotated[list[Path] | None, typer.Argument(metavar="JOURNAL...", help="Files to remove.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Remove journals. What they hold must then be read again."""
    if not journals and not everything:
        raise typer.BadParameter("name the journals to remove, or give --all")
    paths = list(journal_directory().glob("*")) if everything else _found(journals or [])
    for path in paths:
        path.unlink()
    typer.echo(f"{len(paths)} removed")


def _found(journals: list[Path]) -> list[Path]:
    paths = [path if path.exists() else journal_directory() / path for path in journals]
    for path in paths:
        if not path.is_file():
            raise typer.BadParameter(f"there is no journal {path}: `memjax journal list` names them")
    return paths


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)
