"""A config says what it means, and what is wrong with it before a device is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from memjax.train.config import TrainConfig, as_json, read_config, refuse_other_run
from memjax.train.presets import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
TINY = CONFIGS / "tiny.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads_and_begins_with_its_command(path: Path) -> None:
    config = read_config(path)
    assert config.total_steps > 0
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# python -m memjax.train --config configs/train/{path.name}")


def test_memagent_s_recipes_have_the_numbers_of_its_scripts() -> None:
    seven, fourteen = (read_config(CONFIGS / f"memagent_qwen2_5_{size}.yaml") for size in ("7b", "14b"))
    for config, groups in ((seven, 128), (fourteen, 256)):
        assert config.objective == PRESETS["memagent-script"]
        assert (config.rollout.groups, config.rollout.samples, config.batch.optimizer_steps) == (groups, 16, 16)
        assert (config.agent.question, config.agent.chunk, config.agent.memory, config.agent.answer) == (
            1024,
            5000,
            1024,
            1024,
        )
        assert config.rollout.max_chunks == 8
        assert config.optimizer.learning_rate == 1e-6
        assert config.optimizer.warmup_steps == 20 * config.batch.optimizer_steps


def test_a_preset_gives_way_to_the_keys_of_the_objective() -> None:
    config = read_config(TINY, ["preset=dapo", "objective.clip_high=0.4"])
    assert config.objective == PRESETS["dapo"].model_copy(update={"clip_high": 0.4, "overlong_buffer": 0})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group=3", r"unknown config key rollout.group .*did you mean rollout.groups"),
        ("batch.row_tokens=32", r"row_tokens \(32\) must hold the longest conversation, rollout.max_length \(64\)"),
        ("batch.micro_batch_tokens=64", r"micro_batch_tokens is 64, less than one row of 72"),
        ("batch.optimizer_steps=1000", r"optimizer_steps \(1000\) must not exceed rollout.groups \(16\)"),
        ("data.path=tasks.jsonl", r"exactly one of path, tfds, tiny and arithmetic"),
        ("data.tfds=prepared", r"exactly one of path, tfds, tiny and arithmetic"),
        ("supervised=[{name: a, kind: recall, steps: 2, min_steps: 3}]", r"min_steps \(3\) must not exceed steps"),
        ("data.split=eval", r"split is for tfds"),
        ("objective.kl_coef=0.1", r"kl_coef needs the model before the first step as a reference"),
        ("preset=ppo", r"no objective is called 'ppo'"),
        ("rollout.samples=1", r"rollout.samples: Input should be greater than or equal to 2"),
        ("data.tiny.min_chunks=99", r"min_chunks \(99\) must not exceed max_chunks"),
        (
            "checkpoint.best=val/reward/mean@9",
            r"best is 'val/reward/mean@9', but validation measures val/reward/mean@1",
        ),
        ("supervised=[{name: a, kind: trajectories, steps: 1}]", r"kind: trajectories and path belong together"),
        ("rollout_ahead=2", r"rollout_ahead: Input should be 0 or 1"),
    ],
)
def test_a_contradiction_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(TINY, [override])


@pytest.mark.parametrize(
    "override",
    [
        "steps=7",
        "checkpoint.every=3",
        "compute.fsdp=2",
        "batch.micro_batch_tokens=8192",
        "out=elsewhere",
        "log=[wandb]",
    ],
)
def test_a_run_goes_on_when_what_it_learned_means_the_same(override: str) -> None:
    refuse_other_run(as_json(read_config(TINY)), read_config(TINY, [override]))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("objective.clip_low=0.1", "objective.clip_low"),
        ("agent.memory=9", "agent.memory"),
        ("batch.optimizer_steps=3", "batch.optimizer_steps"),
        ("data.tiny.seed=9", "data.tiny.seed"),
        ("supervised=[]", "supervised"),
        ("rollout_ahead=1", "rollout_ahead"),
    ],
)
def test_a_run_does_not_go_on_with_another_meaning(override: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"holds a run with {key} = .*, not .*: change it back"):
        refuse_other_run(as_json(read_config(TINY)), read_config(TINY, [override]))


def test_a_run_goes_on_when_a_key_is_younger_than_it() -> None:
    config = read_config(TINY)
    refuse_other_run({key: value for key, value in as_json(config).items() if key != "rollout_ahead"}, config)


def test_a_run_of_another_version_is_refused_in_one_sentence() -> None:
    config = read_config(TINY)
    before = as_json(config)
    before["agent"]["max_chunks"] = None
    with pytest.raises(ValueError, match=r"^runs/tiny holds a run of another version of memjax: choose another"):
        refuse_other_run(before, config)


def test_the_agent_is_chosen_by_name() -> None:
    agent = {"name": "single", "question": 4, "answer": 6}
    config = read_config(TINY, [f"agent={agent}"])
    assert config.agent.model_dump() == agent
    with pytest.raises(ValueError, match=r"agent.name|there is no agent"):
        read_config(TINY, ["agent.name=unknown"])
    with pytest.raises(ValueError, match=r"unknown config key agent\.max_chunks"):
        read_config(TINY, ["agent.max_chunks=3"])


def test_reading_a_written_config_gives_it_again() -> None:
    config = read_config(TINY)
    assert TrainConfig.model_validate(as_json(config)) == config
