"""`memjax plan`: what a training run would need on hardware that need not be there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from memjax.plan.hardware import Topology
    from memjax.plan.job import Job
    from memjax.plan.programs import Compiled, TooLarge

USAGE = 2

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.command()
def plan(
    config: Annotated[Path, typer.Option(metavar="FILE.yaml", help="The config of the training run.")],
    topology: Annotated[
        str,
        typer.Option(
            metavar="CHIP:SIZE",
            help="The slice: v5e:8x8, v6e:8x8, v5p:4x4x4 and other shapes of these TPUs, or as Google names them, "
            "v5e-64, v5p-128; a100, h100 or h200 with a number (h100:8), estimated only; cpu:8 for this machine as so "
            "many simulated devices.",
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Go over the file.")] = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Ask the compiler, which takes minutes and, for TPUs, libtpu (`uv sync --extra tpu`); or estimate "
            "from shapes alone.",
        ),
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Does this run fit on that slice? Compiles its programs for chips that need not be there.

    The update, the hand-over of the weights, and the engine's prefill and decode are compiled as the run would compile
    them. Printed are the bytes of each device by kind, the least time that the chips' data sheets leave a step, and
    what to change where the run does not fit. Nothing is downloaded: Qwen2.5's shapes are known by heart.
    Exit code 1 says that it does not fit.

    Examples:

        memjax plan --config configs/train/memagent_qwen2_5_7b.yaml --topology v5p:4x4x4

        memjax plan --config configs/train/memagent_qwen2_5_7b.yaml --topology h100:64 --no-compile compute.tensor=8
    """
    from memjax.plan.hardware import read_topology

    try:
        slice_ = read_topology(topology)
        _only_simulated_devices(slice_)
        job = _job(config, overrides or [], slice_, compile_)

        from memjax.plan.report import Plan, as_json, tables

        result = Plan(job, _compile_all(job) if job.devices else {})
        report = as_json(result) if json_output else list(tables(result))
    except ValueError as error:
        if debug:
            raise
        _stop(str(error), USAGE)
    if isinstance(report, dict):
        typer.echo(json.dumps(report, indent=1))
    else:
        console = Console()
        for part in report:
            console.print(part, highlight=False)
    raise typer.Exit(0 if result.fits else 1)


def _only_simulated_devices(slice_: Topology) -> None:
    """Keep jax from this machine's own accelerator, and give it as many CPU devices as are asked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if slice_.chip.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={slice_.count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _job(config: Path, overrides: list[str], slice_: Topology, compiled: bool) -> Job:
    from memjax.plan.hardware import compile_devices, engine_devices
    from memjax.train.config import read_config

    settings = read_config(config, overrides)  # before the seconds that jax takes to load

    from memjax.plan.job import Job, model_shape

    if compiled and not slice_.can_compile:
        raise ValueError(f"there is no compiler for {slice_.name} without a GPU: add --no-compile for an estimate")
    devices = (compile_devices(slice_), engine_devices(slice_)) if compiled else None
    return Job(settings, slice_, *model_shape(settings.model), devices)


def _compile_all(job: Job) -> dict[str, Compiled | TooLarge]:
    from memjax.plan.programs import PROGRAMS, compile_program

    console, done = Console(stderr=True), {}
    for number, name in enumerate(PROGRAMS, start=1):
        with console.status(f"compiling {number} of {len(PROGRAMS)}: {name}; the update takes minutes"):
            done[name] = compile_program(job, name)
        console.print(f"compiled {name} in {done[name].seconds:.0f} s", highlight=False)
    return done


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
