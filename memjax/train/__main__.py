"""`python -m memjax.train`: run a config, or report on a run."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

if TYPE_CHECKING:
    from memjax.train.config import TrainConfig

USAGE, FAILURE = 2, 1
_FILE_WIDTH = 160  # of a report that is not written to a terminal, which would say its own


class _RunFirst(TyperGroup):
    """A group in which a first word that is no command is an argument of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunFirst,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Train a memory agent: `--config FILE.yaml key=value ...` runs or goes on, `report DIR` shows a run. "
    "Every command explains itself: `run --help`.",
)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    config: Annotated[Path, typer.Option(help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Go over the file.")] = None,
) -> None:
    """Train as the config says. Started again, a run that stopped continues.

    Ctrl-C or SIGTERM stops it after the step under way, with its state kept; the second one stops it at once.

    Examples:

    memjax train run --config configs/train/tiny.yaml

    memjax train run --config configs/train/tiny.yaml steps=200
    """
    _refuse_options(overrides or [])
    settings = _settings(config, overrides)  # before the seconds that jax takes to load

    import jax

    from memjax.mesh import start_distributed
    from memjax.rollout.client import ClientError
    from memjax.train.display import TerminalWatcher
    from memjax.train.loop import train
    from memjax.train.rollouts import StepError

    console = Console()
    try:
        start_distributed()
        with _stop_on_signals(console) as stop, TerminalWatcher(console) as watcher:
            exported = train(settings, watcher, stop)
    except ValueError as error:
        _stop(str(error), USAGE)
    except (OSError, ClientError, StepError) as error:
        _stop(str(error), FAILURE)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        _stop(f"a process of this run was lost ({error}); start all of them again to go on", FAILURE)
    console.print(f"the model is in {exported}" if exported else "stopped; start it again to go on", soft_wrap=True)


@app.command()
def report(directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]) -> None:
    """Draw the curves of a run.

    Example:

    memjax train report runs/tiny
    """
    from memjax.train.report import report as tables_of

    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    try:
        for table in tables_of(directory):
            console.print(table)
    except ValueError as error:
        _stop(str(error), USAGE)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The model directory to write.")],
    best: Annotated[bool, typer.Option("--best", help="Of the best checkpoint instead of the last.")] = False,
) -> None:
    """Write the model of a run's last checkpoint, under way or stopped, as a Hugging Face directory.

    A directory that an earlier export wrote is replaced; any other that holds something is refused.

    Example:

    memjax train export runs/tiny models/tiny
    """
    if not (directory / "config.json").exists():  # said before the seconds that jax takes to load
        _stop(f"{directory} holds no run: give the directory that the run has as `out`", USAGE)

    from memjax.train.loop import export as write_model

    try:
        step = write_model(directory, target, best=best)
    except ValueError as error:
        _stop(str(error), USAGE)
    except OSError as error:
        _stop(str(error), FAILURE)
    Console().print(f"{target} holds the model after step {step}", soft_wrap=True)


@app.command()
def demonstrations(
    config: Annotated[Path, typer.Option(help="YAML file of the run that is to learn: its agent and its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Journal to write, or to continue.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Go over the file.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Task file. [default: the config's data]")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a teacher. [default: the variable URL]")] = None,
    model: Annotated[str | None, typer.Option(help="The teacher. [default: the config's model]")] = None,
    samples: Annotated[int, typer.Option(help="Episodes of each task.", min=1)] = 1,
    min_reward: Annotated[float, typer.Option(help="Reward from which an episode is kept.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Work only so many tasks.", min=1)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the journal over.")] = False,
) -> None:
    """Let a teacher, or the model itself, work tasks, and mark the episodes that are good enough to learn from.

    A stage of `kind: trajectories` learns from the journal. Run again, the command continues where it stopped, in the
    middle of a document too, and makes again what failed.

    Examples:

    memjax train demonstrations --config run.yaml --tasks tasks.jsonl --url http://localhost:8000/v1 --out teacher.jsonl

    memjax train demonstrations --config run.yaml --model runs/x/model --samples 8 --out own.jsonl
    """
    from memjax.rollout.client import ClientError
    from memjax.rollout.connect import choose_model
    from memjax.train.config import TaskConfig

    settings = _settings(config, overrides)

    from memjax.train.demonstrations import Plan, make_demonstrations, open_teacher, student_tokenizer
    from memjax.train.scoring import check_rewards

    console = Console()
    try:
        source = settings.data if tasks is None else TaskConfig(path=tasks, metric=settings.data.metric)
        for doubt in check_rewards(settings, [source]):
            console.print(doubt, soft_wrap=True, markup=False)
        choice = choose_model(model if model or url else settings.model, url, os.environ)
        plan = Plan(source, choice.identity(), limit, samples, min_reward, fresh)
        student = student_tokenizer(settings)
        teacher = open_teacher(settings, choice, student)
        with console.status("working") as status:

            def show(made: int, kept: int) -> None:
                status.update(f"{made} episodes, {kept} kept")

            kept, failed = make_demonstrations(settings, student, teacher, plan, out, show)
    except ValueError as error:
        _stop(str(error), USAGE)
    except (OSError, ClientError) as error:
        _stop(str(error), FAILURE)
    console.print(f"{out} holds {kept} episodes to learn from; {failed} failed", soft_wrap=True)


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so, such as rollout or objective.kl.")] = "",
) -> None:
    """List what a config may hold: every key with its type, its default and its meaning.

    Examples:

    memjax train keys

    memjax train keys objective
    """
    from memjax.config_keys import sections_of
    from memjax.train.config import TrainConfig

    prefix = re.sub(r"\.\d+", ".N", prefix)  # an entry of a list
    sections = [(one, [key for key in one.keys if key.name.startswith(prefix)]) for one in sections_of(TrainConfig)]
    if not any(found for _, found in sections):
        known = [section.name for section, _ in sections if section.name]
        _stop(f"no key begins with {prefix!r}: the sections are {', '.join(dict.fromkeys(known))}", USAGE)
    for section, found in sections:
        if found and section.name:
            typer.echo(f"\n# {' with '.join(filter(None, section[:2]))}: {section.about}")
        for key in found:
            typer.echo(f"{key.name}: {key.type}" + (f" [{key.default}]" if key.default else ""))
            typer.echo(f"    {key.meaning}")


def _refuse_options(words: list[str]) -> None:
    """Say how a setting is written to who writes it as other tools have it."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            key, given, value = word.lstrip("-").partition("=")
            setting = f"{key.replace('-', '_')}={value if given else after or 'VALUE'}"
            _stop(f"there is no option {word}: settings of a run are KEY=VALUE, here {setting}", USAGE)


def _settings(config: Path, overrides: list[str] | None) -> TrainConfig:
    from memjax.train.config import read_config

    try:
        return read_config(config, overrides or ())
    except ValueError as error:
        _stop(str(error), USAGE)


@contextmanager
def _stop_on_signals(console: Console) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one ends the process at once."""
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        if stop.is_set():
            console.show_cursor()
            os._exit(128 + number)
        stop.set()
        # Not printed: a handler may run in the middle of a print.
        os.write(2, b"\nstopping after this step; once more stops at once, without it\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
