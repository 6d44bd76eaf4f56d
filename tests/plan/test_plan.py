"""Plans of training runs: what they count, what they compile on simulated devices, what they say."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from memjax.models.config import Qwen2Config
from memjax.models.sizes import QWEN2_5, published_size
from memjax.plan.__main__ import app
from memjax.plan.hardware import read_topology
from memjax.plan.job import Job, model_shape
from memjax.plan.memory import UPDATE, bytes_per_device, held, passing
from memjax.plan.programs import PROGRAMS, Compiled, TooLarge, compile_program
from memjax.plan.report import Plan
from memjax.plan.work import forward_flops, longest, micro_batches, step_times, update_time
from memjax.train.config import read_config

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
SEVEN = CONFIGS / "memagent_qwen2_5_7b.yaml"
SMALL = Qwen2Config(512, 64, 96, 2, 4, 2, 16)
SMALL_BATCH = ["batch.row_tokens=256", "batch.micro_batch_tokens=2048", "rollout.max_length=256", "rollout.slots=8"]
SMALL_TASKS = ["rollout.groups=2", "rollout.samples=2", "batch.optimizer_steps=1", "agent.chunk=64", "agent.memory=32"]
SPLIT = ["compute.fsdp=4", "compute.tensor=2", "rollout.prefix_tokens=512"]


def job(topology: str, *overrides: str, config: Path = SEVEN) -> Job:
    settings = read_config(config, overrides)
    return Job(settings, read_topology(topology), *model_shape(settings.model))


def small_job() -> Job:
    """A small model on eight simulated devices."""
    settings = read_config(SEVEN, [*SMALL_BATCH, *SMALL_TASKS, *SPLIT])
    return Job(settings, read_topology("cpu:8"), SMALL, 500, (jax.devices(), jax.devices()))


@pytest.mark.parametrize(("size", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("7B", 7.616), ("14B", 14.770)])
def test_the_shapes_known_by_heart_have_their_published_sizes(size: str, billions: float) -> None:
    one = replace(job("v5p:4x4x4", f"model=Qwen/Qwen2.5-{size}-Instruct"), devices=None)
    assert one.shape == QWEN2_5[size]
    assert sum(leaf.size for leaf in jax.tree.leaves(one.state.params)) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_hub_id_tells_its_size() -> None:
    assert published_size("Qwen/Qwen2.5-Coder-0.5B-Instruct") == "0.5B"
    assert published_size("Qwen/Qwen2.5-7B") == "7B"
    assert published_size("Qwen/Qwen2.5-Math") is None
    assert published_size("models/mine") is None


@pytest.mark.parametrize("name", ["v5p", "v5p:4x4", "v5e:4x4x4", "v9:2x2", "h100:", "h100:0", "v5e:3x3", "cpu:two"])
def test_an_unknown_topology_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match=r"v5p:4x4x4"):
        read_topology(name)


def test_a_slice_has_four_chips_to_a_process() -> None:
    topology = read_topology("v5p:4x4x8")
    assert (topology.count, topology.per_process, topology.processes) == (128, 4, 32)


def test_weights_are_split_over_all_chips_and_the_engine_s_over_tensor_alone() -> None:
    kinds = held(job("v5p:4x4x4", "compute.tensor=4", "rollout.slots=64"))
    parameters = 7_615_616_512
    assert kinds["weights, float32"] == pytest.approx(4 * parameters / 64, rel=2e-3)
    assert kinds["optimizer"] == pytest.approx(2 * kinds["weights, float32"], rel=1e-3)
    assert kinds["reference"] == kinds["weights, float32"] // 2
    assert kinds["engine's weights"] == pytest.approx(2 * parameters / 4, rel=2e-3)
    assert kinds["KV cache"] == 64 * 8192 * (2 * 28 * 4 * 128 * 2) / 4
    assert "reference" not in held(job("v5p:4x4x4", "objective.kl_coef=0"))


def test_the_arithmetic_of_a_token_is_twice_its_weights() -> None:
    one = job("v5p:4x4x4")
    matrices = 7_615_616_512 - 152_064 * 3584  # the table is looked up, not multiplied
    assert forward_flops(one, 1, 0, 1) == pytest.approx(2 * matrices, rel=1e-4)
    assert forward_flops(one, 1, 1000, 0) - forward_flops(one, 1, 0, 0) == 28 * 4 * 28 * 128 * 1000


def test_a_trajectory_is_as_long_as_its_budgets_allow() -> None:
    one = longest(job("v5p:4x4x4"))
    assert one.document == 8 * 5000
    assert one.prompts == 8 * (1024 + 1024 + 5000) + 2 * 1024
    assert (one.conversations, one.sampled) == (9, 9 * 1024)
    # 128 x 16 of them in 16 updates of micro-batches of 64 rows
    assert micro_batches(job("v5p:4x4x4")) == -(-128 * (one.prompts + one.sampled) // (64 * 8192))


def test_recomputing_costs_a_forward_pass_and_more_chips_share_the_work() -> None:
    kept, again = job("v5p:4x4x4", "compute.remat=false"), job("v5p:4x4x4")
    assert update_time(again).seconds / update_time(kept).seconds == pytest.approx(4 / 3, rel=0.02)
    twice = update_time(job("v5p:4x4x8", "batch.micro_batch_tokens=1048576"))
    assert twice.seconds == pytest.approx(update_time(again).seconds)
    assert step_times(job("cpu:8", "compute.fsdp=8")) is None


@pytest.mark.parametrize(
    ("overrides", "knob"),
    [
        (["rollout.slots=96"], r"^set rollout.slots=\d\d?$"),
        (["batch.micro_batch_tokens=524288", "rollout.slots=8"], r"^set batch.micro_batch_tokens=131072$"),
        (["compute.remat=false", "rollout.slots=8"], r"^set compute.remat=true$"),
        (["compute.tensor=1", "batch.micro_batch_tokens=524288", "rollout.slots=8"], r"compute.tensor=2"),
    ],
)
def test_the_advice_for_a_run_that_does_not_fit_helps(overrides: list[str], knob: str) -> None:
    usual = ["compute.tensor=4", "rollout.slots=32", "batch.micro_batch_tokens=131072"]
    plan = Plan(job("v5e:8x8", *usual, *overrides))
    assert not plan.fits
    assert re.search(knob, plan.advice), plan.advice
    settings = plan.advice.removeprefix("set ").split(" and ")
    assert Plan(job("v5e:8x8", *usual, *overrides, *settings)).needed < plan.needed
    assert Plan(job("v5e:8x8", *usual)).fits


def test_the_programs_compile_and_take_what_was_counted() -> None:
    one = small_job()
    compiled = {name: compile_program(one, name) for name in PROGRAMS}
    assert all(isinstance(it, Compiled) for it in compiled.values())
    batch = 9 * 4 * micro_batches(one) * one.rows * one.packing.row_tokens  # its arrays of numbers
    assert bytes_per_device(one.state) < compiled[UPDATE].arguments < bytes_per_device(one.state) + 2 * batch
    # The estimate is of the right size: it decides where nobody compiles.
    assert passing(one)[UPDATE] / 4 < compiled[UPDATE].passing < 4 * passing(one)[UPDATE]


def test_a_program_that_is_too_large_by_itself_does_not_fit() -> None:
    plan = Plan(job("v5p:4x4x4"), {UPDATE: TooLarge("Used 100G of 95G hbm", 1.0)})
    assert not plan.fits
    assert plan.advice


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_the_command_estimates_without_a_compiler() -> None:
    code, out, _ = run("--config", str(SEVEN), "--topology", "h100:64", "--no-compile", "--json", "compute.tensor=4")
    report = json.loads(out)
    assert code == 0
    assert report["fits"]
    assert report["mesh"] == {"data": 1, "fsdp": 16, "tensor": 4}
    assert report["bytes_per_device"]["needed"] < report["bytes_per_device"]["memory"]
    code, out, _ = run("--config", str(SEVEN), "--topology", "v5e:2x2", "--no-compile")
    assert code == 1
    assert "does NOT fit, by estimate" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--topology", "v7:8x8"], "no topology is called 'v7:8x8': try v5e:8x8"),
        (["--topology", "h100:8"], "there is no compiler for h100:8 without a GPU: add --no-compile"),
        (["--topology", "v5p:4x4x4", "--no-compile", "compute.tensor=3"], "does not cover 64 devices"),
        (["--topology", "v5p:4x4x4", "--no-compile", "compute.tensor=8"], "an engine has the 4 chips of one process"),
        (["--topology", "v5p:4x4x4", "--no-compile", "model=mine"], "there are no files at 'mine'"),
        (["--topology", "v5p:4x4x4", "--no-compile", "rollout.slot=3"], "did you mean rollout.slots"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(words: list[str], sentence: str) -> None:
    code, out, err = run("--config", str(SEVEN), *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_without_libtpu_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    code, _, err = run("--config", str(SEVEN), "--topology", "v5p:4x4x4")
    assert code == 2
    assert "uv sync --extra tpu" in err
    assert "--no-compile" in err
