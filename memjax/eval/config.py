"""What one evaluation is, and which part of it decides whether two runs are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from memjax import config
from memjax.agents.base import Budgets
from memjax.eval.suites import SUITES, Suite, suite_named

AgentName = Literal["memagent", "single", "single-truncated", "no-context", "oracle"]


_MISSING = {
    "suite": f"no suite was named: give one of {', '.join(SUITES)}",
    "out": "no results directory was named: give --out DIR",
}


def load_config(path: Path | None, given: Mapping[str, Any]) -> EvalConfig:
    """The config of a YAML file with options over it. ValueError, which names the option, for what is wrong."""
    try:
        return config.load_config(EvalConfig, path, given=given)
    except config.ConfigError as error:
        if error.missing:
            raise ValueError(_MISSING[error.key]) from None
        if error.key in given and error.key != "suite":  # the one that is an argument
            raise ValueError(f"--{error.key.replace('_', '-')}: {error.problem}") from None
        raise


class EvalConfig(BaseModel):
    """One evaluation: a suite, a model, an agent. None means what the suite says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str
    """Name in memjax.eval.suites."""
    out: Path
    """Results directory; a killed run goes on when it is started with the same one."""
    model: str | None = None
    """HF directory, .gguf file or hub id to run here; with `url`, the service's name for it."""
    url: str | None = None
    """OpenAI-compatible service to ask instead of a local model; its key comes from API_KEY."""
    tokenizer: str | None = None
    """HF directory or hub id that counts and cuts tokens; without it a service's tokens are estimated."""
    window: int | None = Field(None, ge=64)
    """Most tokens of prompt and reply together: cuts `single-truncated`, and sizes a local engine."""
    agent: AgentName = "memagent"
    preset: Literal["greedy", "memagent"] = "greedy"
    """Sampling, extraction and metric: greedy and strict, or MemAgent's (temperature 0.7, top-p 0.95, theirs)."""
    tasks: tuple[str, ...] | None = None
    """Some of the suite's tasks."""
    lengths: tuple[str, ...] | None = None
    """Context lengths in tokens, such as 7k, 128k, 1m."""
    samples: int | None = Field(None, ge=1)
    """Samples per task and length."""
    data: Mapping[str, Path] = Field(default_factory=dict)
    """Files by name, such as hotpotqa, squad, longbench, tasks."""
    question_tokens: int | None = None
    chunk_tokens: int | None = None
    memory_tokens: int | None = None
    answer_tokens: int | None = None
    layout: Literal["memory_first", "chunk_first"] = "memory_first"
    """Order of the memory agent's prompt."""
    prompts: Path | None = None
    """Directory of prompts, or a MemAgent .py file, instead of our own."""
    seed: int = 0
    """Of the tasks that are drawn and of the sampling."""
    concurrency: int = Field(8, ge=1)
    """Samples at a time, per replica with `ray`."""
    ray: bool = False
    """Spread the samples over one engine replica per node of a Ray cluster."""

    @field_validator("suite")
    @classmethod
    def _known(cls, name: str) -> str:
        return suite_named(name).name

    @model_validator(mode="after")
    def _consistent(self) -> EvalConfig:
        suite = self.chosen
        unknown = [task for task in self.tasks or () if task not in suite.tasks]
        if unknown:
            raise ValueError(f"{suite.name} has no task {unknown[0]!r} (tasks: {', '.join(suite.tasks)})")
        if self.lengths and not suite.lengths:
            raise ValueError(f"the texts of {suite.name} have the length they have; leave --lengths out")
        allowed = (*suite.data, *suite.optional_data)
        for name in self.data:
            if name not in allowed:
                takes = f"takes {', '.join(allowed)}" if allowed else "takes none"
                raise ValueError(f"{suite.name} has no use for data {name!r}; it {takes}")
        for name in suite.data:
            if name not in self.data:
                raise ValueError(f"{suite.name} needs a file: give --data {name}=PATH")
        return self

    @property
    def chosen(self) -> Suite:
        """The suite."""
        return suite_named(self.suite)

    @property
    def budgets(self) -> Budgets:
        """The agent's budgets: the suite's, where the config does not say otherwise."""
        given = {name: getattr(self, f"{name}_tokens") for name in ("question", "chunk", "memory", "answer")}
        suite = self.chosen.budgets
        return Budgets(**{name: getattr(suite, name) if value is None else value for name, value in given.items()})

    def identity(self) -> dict[str, Any]:
        """Everything that a score may depend on, with the suite's defaults filled in; what a directory is compared by.

        Left out are where a service runs, how many samples are read at a time and on which machines, and the places of
        files: model and prompts are known by their hashes, and every task by its own.
        """
        fields = self.model_dump(mode="json", exclude={"out", "url", "concurrency", "ray", "prompts", "model"})
        suite = self.chosen
        fields["tasks"] = list(self.tasks or suite.tasks)
        fields["lengths"] = list(self.lengths or suite.lengths)
        fields["data"] = {name: path.name for name, path in self.data.items()}
        fields["samples"] = self.samples or suite.samples
        for name in ("question", "chunk", "memory", "answer"):
            fields[f"{name}_tokens"] = getattr(self.budgets, name)
        return fields
