"""`memjax journal`: the journals that `memjax ask` keeps, where they are, and how long."""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memjax.data.documents import Document
from memjax.episodes.journal import refuse_if_in_use, refuse_other_files
from memjax.episodes.recorded import RecordedEpisode, Recording
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
    first = document.files[0].path.stem if document.files else "no-document"
    stem = re.sub(r"\W+", "-", first).strip("-")[:40] or "document"
    return journal_directory() / f"{stem}-{digest}.jsonl"


def expire(now: float | None = None) -> None:
    """Remove what was not used for `KEPT_DAYS` days."""
    before = (time.time() if now is None else now) - KEPT_DAYS * 86_400
    for path in journal_directory().glob("*"):
        with suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < before:
                path.unlink()


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
    table = Table("last used", "journal", "document", "question", "agent", "model", "calls", "status", "kB", box=None)
    kept = sorted((path for path in journal_directory().glob("*") if path.is_file()), key=_age)
    journals = [path for path in kept if path.suffix == ".jsonl"]
    for path in journals:
        stat = path.stat()
        used, size = time.strftime("%Y-%m-%d %H:%M", time.localtime(stat.st_mtime)), f"{stat.st_size / 1000:.0f}"
        try:
            found = Recording(path).episodes.values()
            rows = [[*_about(one), str(len(one.digests)), one.status] for one in found] or [[""] * 4 + ["0", "empty"]]
        except ValueError as error:
            rows = [[""] * 5 + [f"damaged: {str(error).removeprefix(str(path))}"]]
        for row in rows:
            table.add_row(used, path.name, *map(escape, row), size)
    _console().print(table if journals else f"there are no journals in {journal_directory()}")
    if copies := len(kept) - len(journals):
        _console().print(f"Beside them are {copies} copies of piped documents that are not answered yet.")


@app.command(no_args_is_help=True)
def show(journals: Named) -> None:
    """Print what was asked and answered, and with which model, agent and document."""
    problems = []
    for path in _found(journals):
        try:
            episodes = Recording(path).episodes
        except ValueError as error:
            problems.append(str(error))
            continue
        for name, one in episodes.items():
            shown = {"journal": path, "episode": name, "status": f"{one.status}, {len(one.digests)} calls"}
            for field in ("question", "document", "identity", "agent", "sampling"):
                value = one.begin.get(field)
                pairs = value.items() if isinstance(value, dict) else ()
                shown[field] = ", ".join(f"{key} {val}" for key, val in pairs if val is not None) if pairs else value
            if one.end and not one.end.get("error"):
                shown["answer"] = extract_answer(one.end["answer"])
            for field, value in shown.items():
                _console().print(f"{field:<9} {value}", highlight=False, markup=False, soft_wrap=True)
            _console().print()
        if not episodes:
            problems.append(f"{path} is empty: nothing was asked yet")
    if problems:
        _stop("; ".join(problems))


@app.command("rm", no_args_is_help=True)
def remove(
    journals: Annotated[list[Path] | None, typer.Argument(metavar="JOURNAL...", help="Files to remove.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them, and copies of piped documents.")] = False,
) -> None:
    """Remove journals. What they hold must then be read again. Other files, and journals in use, are refused."""
    if everything == bool(journals):
        _stop("name the journals to remove, or give --all, not both")
    paths = list(journal_directory().glob("*")) if everything else _found(journals or [])
    try:
        for path in paths:
            if path.parent.absolute() != journal_directory().absolute():
                refuse_other_files(path)
            refuse_if_in_use(path)
    except ValueError as error:
        _stop(f"{error}; nothing was removed")
    for path in paths:
        path.unlink()
    typer.echo(f"{len(paths)} removed")


def _age(path: Path) -> float:
    """What the last used come first by; a file that another process has just removed comes last."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _about(one: RecordedEpisode) -> list[str]:
    """Document, question, agent and model of an episode, as far as they are told."""
    told = [
        one.begin.get(name, {}).get(key)
        for name, key in (("document", "name"), ("agent", "name"), ("identity", "model"))
    ]
    document, agent, model = (str(value or "")[:40] for value in told)
    return [document, str(one.begin.get("question", ""))[:50], agent, model]


def _found(journals: list[Path]) -> list[Path]:
    """The files, each where it was named, or in the directory of journals, or there with its ending."""
    paths = []
    for path in journals:
        kept = journal_directory() / path
        found = [one for one in (path, kept, kept.with_name(f"{kept.name}.jsonl")) if one.is_file()]
        if not found:
            _stop(f"there is no journal {path}: `memjax journal list` names them")
        paths.append(found[0])
    return paths


def _stop(message: str) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(2)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)
