"""Configs are checked, frozen, and refuse what they do not know with the nearest key."""

import re

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memjax.config import load_config


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    rate: float = Field(0.1, gt=0)
    steps: int = 3


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "x"
    sizes: tuple[int, ...] = ()
    optimizer: Inner = Inner()
    spare: Inner | None = None
    stages: tuple[Inner, ...] = ()


def test_file_and_overrides_are_merged_and_the_last_wins(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: run\noptimizer:\n  rate: 0.5\n")
    config = load_config(Outer, path, ["optimizer.steps=7", "sizes=[1, 2]", "optimizer.steps=8", "spare.steps=1"])
    assert config == Outer(name="run", sizes=(1, 2), optimizer=Inner(rate=0.5, steps=8), spare=Inner(steps=1))
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "y"
    assert load_config(Outer) == Outer()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.rte=1", "unknown config key optimizer.rte: did you mean optimizer.rate?"),
        ("optimizer.x=1", "unknown config key optimizer.x: the keys there are optimizer.rate, optimizer.steps"),
        ("optimiser.rate=1", "unknown config key optimiser: did you mean optimizer?"),
        ("rate=1", "did you mean optimizer.rate?"),
        ("zzz=1", "the keys are name, sizes, optimizer"),
        ("optimizer.rate=-1", "optimizer.rate: Input should be greater than 0, got -1"),
        ("sizes=[a]", "sizes.0: Input should be a valid integer"),
        ("name", "an override is key=value"),
        ("name.inner=1", "name: Input should be a valid string"),
        ("sizes=[", "is not YAML"),
        ("stages=[{rate: 1}, {stps: 1}]", "unknown config key stages.1.stps: did you mean stages.1.steps?"),
        ("stages=[{rate: -1}]", "stages.0.rate: Input should be greater than 0, got -1"),
        ("stages=3", "stages: must be a list, such as stages='[...]', got 3"),
        ("stages.0.rate=3", "stages: must be a list"),
        ("stages=[3]", "stages.0: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_override_is_refused(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(Outer, None, [override])


def test_an_override_reaches_into_a_list():
    stages = "stages=[{rate: 1}, {rate: 2}]"
    config = load_config(Outer, None, [stages, "stages.1.steps=9"])
    assert config.stages == (Inner(rate=1), Inner(rate=2, steps=9))
    for place in ("2", "x"):
        with pytest.raises(ValueError, match=f"a list of 2 has no entry {place}"):
            load_config(Outer, None, [stages, f"stages.{place}.steps=9"])
    with pytest.raises(ValueError, match=r"did you mean stages\.1\.steps"):
        load_config(Outer, None, [stages, "stages.1.stps=9"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b: 1\na: c: d", r"c.yaml, line 2, column 5 is not YAML: mapping values"),
        ("- 1", "must hold keys and values, got a list"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(Outer, path)
    with pytest.raises(ValueError, match="there is no config file"):
        load_config(Outer, tmp_path / "absent.yaml")
