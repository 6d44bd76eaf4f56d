"""What a training run is told: one frozen model per part, checked before any device is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from memjax.agents.registry import DEFAULT, AnyAgent
from memjax.config import config_error, flattened, load_config
from memjax.data import arithmetic, tiny
from memjax.data.arithmetic import ArithmeticTasks
from memjax.data.tiny import POLICIES, TinyTasks
from memjax.episodes.limits import Limits
from memjax.own_code import hash_of, is_own, load_own
from memjax.rewards import check_metric
from memjax.train.optimizer_config import OptimizerConfig
from memjax.train.packing import PackingConfig
from memjax.train.presets import ObjectiveConfig, preset, within_budgets

LogName = Literal["tensorboard", "wandb"]

FRESH_MODELS: Mapping[str, Any] = MappingProxyType({"tiny": tiny, "tiny-arithmetic": arithmetic})
"""Model names that stand for a fresh one, and the module of what it is made to learn."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskConfig(_Part):
    """Where tasks come from: a task file, a prepared data set, or a generator."""

    path: Path | None = None
    """A task file in any format that `memjax.data.tasks` reads."""
    tfds: Path | None = None
    """A data set of memjax.data.tfds, prepared: the directory with dataset_info.json. A task is read when it is due."""
    split: str = "train"
    """The part of the data set, as tensorflow-datasets writes it: eval, train[:10%]."""
    tiny: TinyTasks | None = None
    """The tiny task, made as it is needed."""
    arithmetic: ArithmeticTasks | None = None
    """Small sums for an agent with a calculator, made as they are needed."""
    metric: str | None = None
    """Scores the answers of a file's tasks instead of the metric that its format implies: a name, or a function."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskConfig:
        if [self.path, self.tfds, self.tiny, self.arithmetic].count(None) != 3:
            raise ValueError("tasks come from exactly one of path, tfds, tiny and arithmetic")
        if self.metric is not None and self.path is None:
            raise ValueError("metric is for the tasks of a file; other tasks have their own")
        if self.metric is not None:
            check_metric(self.metric)
        if self.split != "train" and self.tfds is None:
            raise ValueError("split is for tfds: a task file and a generator have no splits")
        return self


class RewardConfig(_Part):
    """One of several rewards, whose weighted sum is maximised."""

    metric: str | None = None
    """A metric of memjax.rewards, or a function as path/to/file.py:name or module:name; null for the task's metric."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its value is multiplied with in the sum."""
    outcome: bool = False
    """Whether it tells right from wrong: it is what groups must differ in, and what validation reports."""

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str | None) -> str | None:
        if metric is not None:
            check_metric(metric)
        return metric

    @property
    def name(self) -> str:
        """What logs call it: of a function, its own name."""
        return (self.metric or "task").rpartition(":")[2]


class RolloutConfig(_Part):
    """How trajectories are sampled."""

    groups: int = Field(default=128, ge=1)
    """Tasks that one rollout batch learns from."""
    samples: int = Field(default=16, ge=2)
    """Trajectories of each task, whose rewards are compared."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampling, and of the learner's distribution."""
    refills: int = Field(default=3, ge=0)
    """With dynamic sampling: how often groups without variance are replaced by other tasks in one step."""
    slots: int = Field(default=64, ge=1)
    """Replies decoded side by side."""
    max_length: int = Field(default=8192, ge=16)
    """Longest conversation, prompt and reply together."""
    prefix_tokens: int = Field(default=16_384, ge=0)
    """Tokens of prompts whose prefill is kept for equal prompts of other samples."""
    max_chunks: int | None = Field(default=8, ge=1)
    """Chunks after which a training document loses its middle; null for none. Validation reads everything."""


class BatchConfig(_Part):
    """How a rollout batch becomes updates: see memjax.train.packing.PackingConfig."""

    row_tokens: int = Field(default=8192, ge=2)
    """Length of the rows that conversations are packed into."""
    micro_batch_tokens: int = Field(default=16_384, ge=2)
    """Tokens of one forward and backward pass on all devices together."""
    optimizer_steps: int = Field(default=16, ge=1)
    """Updates that a full rollout batch gives, each from whole groups; a batch with fewer groups gives fewer."""


class ComputeConfig(_Part):
    """How the model runs; nothing here changes what is learned beyond rounding."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations, and of the weights that sample; master weights are float32."""
    remat: bool = True
    """Recompute each layer in the backward pass, which holds one layer's activations instead of all."""
    scan_layers: bool = True
    """Compile one layer and loop over it."""
    data: int = 1
    """Devices that share out rows with a copy of the weights each; -1 for what the other axes leave."""
    fsdp: int = 1
    """Devices that share out rows and weights."""
    tensor: int = 1
    """Devices that share out heads and hidden units."""


class ValidationConfig(_Part):
    """Tasks that are answered now and then, and never learned from."""

    data: TaskConfig | None = None
    """Their source; null for no validation."""
    tasks: int = Field(default=128, ge=1)
    """How many of them, from the start of the source."""
    samples: int = Field(default=4, ge=1)
    """Answers to each, for mean@n and best@n."""
    every: int = Field(default=5, ge=1)
    """Steps between two validations; there is one before the first step and one after the last."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=0.7, gt=0, le=1)
    """Cut of the sampling."""

    def metrics(self) -> tuple[str, ...]:
        """The names of the rewards that it measures."""
        return (f"val/reward/mean@{self.samples}", f"val/reward/best@{self.samples}") if self.data else ()


class CheckpointConfig(_Part):
    """What is kept for a restart."""

    every: int = Field(default=10, ge=1)
    """Steps between two checkpoints; there is one at the end of every stage."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints that stay."""
    best: str | None = None
    """A metric, such as val/reward/mean@4, whenever it reaches a new height there is a checkpoint, which stays too."""


class SupervisedStage(_Part):
    """Training on written conversations, before any reinforcement learning. A step is one update."""

    name: str
    """What the log calls it."""
    kind: Literal["recall", "demonstrations", "trajectories"]
    """Facts to list anew, whole episodes by scripted readers, or those of a file."""
    steps: int = Field(ge=1)
    """Updates, at most."""
    until_loss: float | None = None
    """Loss below which the stage is over before that. A run whose stage does not get there stops: the rest needs it."""
    min_steps: int = Field(default=1, ge=1)
    """Updates before a loss can be low enough."""
    examples: int = Field(default=64, ge=1)
    """Recall examples, or documents, of one update."""
    path: Path | None = None
    """The journal of the episodes, such as `memjax train demonstrations` makes."""
    tasks: TinyTasks = TinyTasks()
    """The documents that are read."""
    arithmetic: ArithmeticTasks | None = None
    """Sums that are worked out instead."""
    policies: Mapping[str, float] = {"oracle": 1.0}
    """Share of the documents that each scripted reader reads; FILE.py:NAME is one of your own, a function of a task and
    a random.Random that returns the replies as a list of str."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Starts afresh with the stage."""

    @model_validator(mode="after")
    def _sources_agree(self) -> SupervisedStage:
        if (self.kind == "trajectories") != (self.path is not None):
            raise ValueError(f"kind: trajectories and path belong together, got kind {self.kind} and path {self.path}")
        if self.min_steps > self.steps:
            raise ValueError(f"min_steps ({self.min_steps}) must not exceed steps ({self.steps})")
        known = arithmetic.POLICIES if self.arithmetic else tuple(POLICIES)
        for name in sorted(set(self.policies) - set(known)) if self.kind == "demonstrations" else ():
            if not is_own(name):
                raise ValueError(
                    f"no scripted reader is called {name!r}; there are {', '.join(known)}, and FILE.py:NAME"
                )
            if not callable(load_own(name, "scripted reader")):
                raise ValueError(f"{name} is no scripted reader: write def {name.rpartition(':')[2]}(task, rng)")
        if not sum(self.policies.values()) > 0 or min(self.policies.values()) < 0:
            raise ValueError(f"the shares of the policies must be positive, got {dict(self.policies)}")
        return self


class TrainConfig(_Part):
    """One run."""

    out: Path
    """The run's directory. A run that stopped goes on when it is started again with the same one."""
    model: str
    """A model directory, .gguf file or hub id, or `tiny` or `tiny-arithmetic` for a fresh one that learns that task."""
    seed: int = 0
    """Names every random draw of the run."""
    supervised: tuple[SupervisedStage, ...] = ()
    """Stages before the reinforcement learning, in order."""
    steps: int = Field(ge=0)
    """Rollout batches to learn from."""
    data: TaskConfig
    """Tasks to learn from."""
    agent: AnyAgent = DEFAULT
    """Who works the tasks: the name of one that is built in, or FILE.py:NAME of your own, and its keys."""
    limits: Limits = Limits()
    """Bounds of an episode; one that goes over them fails."""
    rewards: tuple[RewardConfig, ...] = ()
    """What a trajectory is worth, where that is more than the metric of its task."""
    reward_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a reward may take for one answer."""
    rollout: RolloutConfig = RolloutConfig()
    """The sampling."""
    preset: str | None = None
    """A published objective; the keys of `objective` go over it."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is maximised."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How gradients become updates."""
    batch: BatchConfig = BatchConfig()
    """How trajectories become gradients."""
    compute: ComputeConfig = ComputeConfig()
    """How and where the model runs."""
    validation: ValidationConfig = ValidationConfig()
    """How the run is judged."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How the run is kept."""
    rollout_ahead: Literal[0, 1] = 0
    """1 samples the next batch while this one is learned from, with weights that are one step old."""
    dump_every: int = Field(default=10, ge=1)
    """Steps between two files of rollouts that people can read."""
    log: tuple[LogName, ...] = ()
    """Where numbers go besides metrics.jsonl: tensorboard, wandb."""

    @model_validator(mode="before")
    @classmethod
    def _fill_objective(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("preset") is not None:
            given = values.get("objective", {})
            given = given.model_dump() if isinstance(given, ObjectiveConfig) else given
            return {**values, "objective": preset(values["preset"]).model_dump() | dict(given)}
        return values

    @field_validator("objective")
    @classmethod
    def _length_is_the_agents(cls, objective: ObjectiveConfig, info: ValidationInfo) -> ObjectiveConfig:
        # Where the agent itself is wrong, that is what is told.
        return within_budgets(objective, info.data["agent"]) if "agent" in info.data else objective

    @model_validator(mode="after")
    def _parts_agree(self) -> TrainConfig:
        if self.batch.row_tokens < self.rollout.max_length:
            raise ValueError(
                f"batch.row_tokens ({self.batch.row_tokens}) must hold the longest conversation, "
                f"rollout.max_length ({self.rollout.max_length})"
            )
        if self.batch.optimizer_steps > self.rollout.groups:
            raise ValueError(
                f"batch.optimizer_steps ({self.batch.optimizer_steps}) must not exceed rollout.groups "
                f"({self.rollout.groups}): an update learns from whole groups"
            )
        if self.objective.needs_reference and self.supervised:
            raise ValueError(
                "objective.kl_coef needs the model before the first step as a reference, which supervised stages "
                "change: set kl_coef to 0, or run the stages by themselves and start from their model"
            )
        names = [reward.name for reward in self.rewards]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two of rewards are called {twice}: give it once, or give the functions other names")
        if len(self.rewards) > 1 and (outcomes := sum(reward.outcome for reward in self.rewards)) != 1:
            raise ValueError(f"exactly one of rewards must have outcome: true, got {outcomes} of {len(names)}")
        if (best := self.checkpoint.best) is not None and best not in (known := self.validation.metrics()):
            raise ValueError(f"checkpoint.best is {best!r}, but validation measures {' and '.join(known) or 'nothing'}")
        self.packing()
        return self

    def packing(self, row_multiple: int = 1) -> PackingConfig:
        """The packing on a mesh that splits rows over `row_multiple` devices."""
        return PackingConfig(**self.batch.model_dump(), row_multiple=row_multiple)

    @property
    def total_steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self.supervised) + self.steps


# What may differ between a run and its continuation: it changes neither what was done so far nor what a step means.
_MAY_CHANGE = (
    *("out", "steps", "validation", "checkpoint", "dump_every", "log", "compute"),
    *("batch.micro_batch_tokens", "rollout.slots", "rollout.prefix_tokens", "reward_seconds", "limits"),
)


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file with overrides; ValueError in one sentence for what is wrong with it."""
    return load_config(TrainConfig, path, overrides)


def refuse_other_run(before: Mapping[str, Any], now: TrainConfig) -> None:
    """ValueError where a run started with the config `before`, as JSON, cannot go on with `now`."""
    try:
        # Keys that did not exist when the run was started have their defaults.
        old, new = flattened(as_json(TrainConfig.model_validate(before))), flattened(as_json(now))
    except ValidationError as error:
        if error.errors()[0]["type"] == "value_error":  # such as an agent whose file is not there
            raise ValueError(
                f"{now.out} holds a run whose config cannot be read: {config_error(error)}; undo what has changed, or "
                "choose another directory with out=DIR"
            ) from None
        raise ValueError(
            f"{now.out} holds a run of another version of memjax: choose another directory with out=DIR"
        ) from None
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not any(f"{key}.".startswith(f"{name}.") for name in _MAY_CHANGE):
            raise ValueError(
                f"{now.out} holds a run with {key} = {old.get(key)!r}, not {new.get(key)!r}: "
                "change it back to go on, or choose another directory with out=DIR"
            )


def code_of(config: TrainConfig) -> dict[str, str]:
    """Hashes of the files of the user's own that give the steps their meaning, and of the agent's prompts, by name."""
    agent, rewards = config.agent, (config.data.metric, *(reward.metric for reward in config.rewards))
    names = (agent.name, *rewards, *(policy for stage in config.supervised for policy in stage.policies))
    hashes = {name: str(hash_of(name)) for name in names if name and is_own(name)}
    return hashes | {agent.name: f"{hashes.get(agent.name)} {agent.prompt_hash}"}


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON holds it, with every default written out."""
    return config.model_dump(mode="json")
