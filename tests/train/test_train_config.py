"""A config says what it means, and what is wrong with it before a device is touched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memjax.rewards import score
from memjax.train.config import TaskConfig, TrainConfig, as_json, read_config, refuse_other_run
from memjax.train.presets import PRESETS
from memjax.train.rollouts import TaskSource

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
TINY = CONFIGS / "tiny.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads_and_begins_with_its_command(path: Path) -> None:
    config = read_config(path)
    assert config.total_steps > 0
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# python -m memjax.train --config configs/train/{path.name}")


@pytest.mark.parametrize(("size", "groups", "steps"), [("7b", 128, 400), ("14b", 256, 200)])
def test_memagent_s_recipes_have_the_numbers_of_its_scripts(size: str, groups: int, steps: int) -> None:
    # run_memory_7B.sh and run_memory_14B.sh of BytedTsinghua-SIA/MemAgent at 76b7a65, and what verl has by default
    config = read_config(CONFIGS / f"memagent_qwen2_5_{size}.yaml")
    assert config.objective == PRESETS["memagent-script"]  # its numbers: test_presets.py
    agent, rollout, validation, optimizer = config.agent, config.rollout, config.validation, config.optimizer
    assert (agent.question, agent.chunk, agent.memory, agent.answer) == (1024, 5000, 1024, 1024)
    assert (rollout.groups, rollout.samples, rollout.max_chunks, rollout.temperature) == (groups, 16, 8, 1.0)
    assert config.batch.optimizer_steps == 16  # of 128 / 8 and of 256 / 16 prompts
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (1e-6, "constant", 20 * 16)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.999, 0.01, 1.0)
    assert (validation.tasks, validation.samples, validation.every) == (128, 4, 5)
    assert (validation.temperature, validation.top_p, config.checkpoint.every) == (1.0, 0.7, 10)
    assert (config.steps, config.rollout_ahead, config.supervised) == (steps, 0, ())  # the paper's v2: about 400 of 7B


# What a row of each file looks like whose path a config names: such data is not on every machine.
ROWS: dict[str, dict[str, Any]] = {
    "hotpotqa_train_32k.parquet": (
        MEMAGENT := {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": "Where is it?"}],
            "context": "Document 1:\nParis",
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": ["Paris"]},
            "extra_info": {"index": 0, "question": "Where is it?", "num_docs": 200},
        }
    ),
    "hotpotqa_dev.parquet": MEMAGENT,
    "hotpot_train_subset.json.gz": {
        "_id": "a",
        "question": "Where is it?",
        "answer": "Paris",
        "context": [["Paris", ["A city."]]],
        "supporting_facts": [["Paris", 0]],
    },
}
# What the tasks of a config are scored by in training and in validation.
SCORED_BY = {
    "memagent_qwen2_5_7b": ("memagent_reward", "memagent_reward"),
    "memagent_qwen2_5_14b": ("memagent_reward", "memagent_reward"),
    "qwen2_5_0_5b_cpu_smoke": ("f1", None),
    "tiny": ("em", "em"),
    "tiny_chain": ("em", "em"),
    "tiny_control": ("em", None),
    "tiny_imperfect": ("em", "em"),
    "tiny_imperfect_control": ("em", None),
    "tiny_bullets": ("em", "em"),
    "tiny_tools": ("em", "em"),
}


def in_its_format(name: str, folder: Path) -> Path:
    """A file of that name with one made-up row."""
    path, row = folder / name, ROWS[name]
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_bytes(gzip.compress(json.dumps([row]).encode()))
    return path


def metric_of(data: TaskConfig, folder: Path) -> str:
    """What scores the tasks of a source, in training and in validation alike."""
    if data.path is not None:
        data = data.model_copy(update={"path": in_its_format(data.path.name, folder)})
    source = TaskSource(data, seed=0)
    (metric,) = {source.training(0).metric, source.first(1)[0].metric}
    return metric


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_scores_its_tasks_as_its_recipe_does(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    validation = config.validation.data
    found = metric_of(config.data, tmp_path), metric_of(validation, tmp_path) if validation else None
    assert found == SCORED_BY[path.stem]


def test_a_listing_is_no_answer_to_memagent_s_training_tasks(tmp_path: Path) -> None:
    task = TaskSource(TaskConfig(path=in_its_format("hotpotqa_dev.parquet", tmp_path)), seed=0).training(0)
    replies = {
        "So \\boxed{Paris}": 1,
        "\\boxed{London, Rome, Paris}": 0,
        "London, Rome or Paris": 0,
        "\\boxed{not Paris}": 0,
    }
    assert {reply: score(task.metric, reply, task.answers) for reply in replies} == replies


def test_a_preset_gives_way_to_the_keys_of_the_objective() -> None:
    config = read_config(TINY, ["preset=dapo", "objective.clip_high=0.4"])
    assert config.objective == PRESETS["dapo"].model_copy(update={"clip_high": 0.4, "overlong_buffer": 0})


@pytest.mark.parametrize(
    ("overrides", "limit", "buffer"),
    [
        (["agent.memory=2048"], 2048, 410),
        (["agent={name: single, answer: 100}"], 100, 20),
        (["objective.overlong_limit=500"], 500, 100),
        (["objective.overlong_buffer=0"], None, 0),
    ],
)
def test_dapo_s_over_length_penalty_has_the_agent_s_budget(
    overrides: list[str], limit: int | None, buffer: int
) -> None:
    config = read_config(CONFIGS / "memagent_qwen2_5_7b.yaml", ["preset=dapo", *overrides])
    assert (config.objective.overlong_limit, config.objective.overlong_buffer) == (limit, buffer)
    assert TrainConfig.model_validate(as_json(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective={overlong_limit: 11, overlong_buffer: 2}", r"objective: overlong_limit \(11\) is more than"),
        ("objective.overlong_buffer=11", r"overlong_buffer \(11\) must not exceed overlong_limit \(10\)"),
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


def test_a_run_whose_agent_has_moved_is_refused_by_its_file() -> None:
    config = read_config(TINY)
    before = as_json(config) | {"agent": {"name": "moved_away.py:reader"}}
    with pytest.raises(ValueError, match=r"^runs/tiny holds .* agent: there is no file moved_away.py, .* out=DIR$"):
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
