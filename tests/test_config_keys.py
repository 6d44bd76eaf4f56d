"""The tables of settings say what the models say."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from memjax.config_keys import sections_of
from memjax.eval.config import EvalConfig
from memjax.train.__main__ import app
from memjax.train.config import TrainConfig

ROOT = Path(__file__).parents[1]


class Left(BaseModel):
    """The left one."""

    name: Literal["left"] = "left"
    size: int = 1


class Right(BaseModel):
    """The right one."""

    name: Literal["right"] = "right"


class Everything(BaseModel):
    """All there is.

    More of it.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    out: Path
    """Where to."""
    rate: float | None = Field(0.5, gt=0, le=1)
    kinds: tuple[Literal["a", "b"], ...] = ("a",)
    shares: Mapping[str, float] = {"a": 1.0}
    side: Left | Right = Field(Left(), discriminator="name")
    many: tuple[Left, ...] = ()


def test_every_kind_of_setting_is_told():
    sections = list(sections_of(Everything))
    assert [section[:3] for section in sections] == [
        ("", "", "All there is."),
        ("side", "name: left", "The left one."),
        ("side", "name: right", "The right one."),
        ("many.N", "", "The left one."),
    ]
    assert sections[0].keys == [
        ("out", "path", "required", "Where to."),
        ("rate", "float | null > 0, <= 1", "0.5", ""),
        ("kinds", "list of a | b", "[a]", ""),
        ("shares", "mapping of str to float", "{a: 1.0}", ""),
        ("side", "section", "", ""),
        ("many", "list of sections", "[]", ""),
    ]
    assert [key.name for key in sections[1].keys] == ["side.size"]


@pytest.mark.parametrize("config", [TrainConfig, EvalConfig])
def test_every_setting_has_a_meaning(config):
    assert [key.name for section in sections_of(config) for key in section.keys if not key.meaning] == []


def test_the_terminal_shows_the_keys_with_a_prefix():
    shown = CliRunner().invoke(app, ["keys", "rewards.0"])
    assert shown.exit_code == 0
    assert "rewards.N.weight: float [1.0]\n    What its value is multiplied with" in shown.output
    assert "rollout" not in shown.output
    assert "objective.kl_coef: float >= 0 [0.0]" in CliRunner().invoke(app, ["keys"]).output
    missing = CliRunner().invoke(app, ["keys", "zzz"])
    assert (missing.exit_code, "no key begins with 'zzz'" in missing.output) == (2, True)


def test_keys_and_mistakes_of_a_config_come_before_jax_is_loaded():
    program = """
import sys
from memjax.train.__main__ import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print("exit", end.code, "jax" in sys.modules)
"""
    for arguments, code in ((["keys"], 0), (["run", "--config", "configs/train/tiny.yaml", "rollout.smples=1"], 2)):
        command = [sys.executable, "-c", program, *arguments]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == f"exit {code} False", run.stderr


def test_the_page_of_the_configuration_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import configuration

    advice = "docs/configuration.md is out of date: uv run python scripts/configuration.py"
    assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page(), advice
