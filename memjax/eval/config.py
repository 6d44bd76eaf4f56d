"""What one evaluation is, and which part of it decides whether two runs are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from memjax import config
from memjax.agents.config import AgentConfig
from memjax.agents.registry import BUDGETS, DEFAULT, AnyAgent, agent_keys, option_of
from memjax.episodes.limits import Limits
from memjax.eval.suites import SUITES, Suite, suite_named

_OF_AGENT = {"agent": "name", "layout": "layout", "prompts": "prompts", **{f"{name}_tokens": name for name in BUDGETS}}
"""The options that are keys of the agent."""
_SET = "agent_settings"  # the option --set

_MISSING = {
    "suite": f"no suite was named: give one of {', '.join(SUITES)}",
    "out": "no results directory was named: give --out DIR",
}


def load_config(path: Path | None, given: Mapping[str, Any]) -> EvalConfig:
    """The config of a YAML file with options over it. ValueError, which names the option, for what is wrong."""
    of_agent = {key: given[option] for option, key in _OF_AGENT.items() if option in given}
    settings = given.get(_SET, ())
    given = {name: value for name, value in given.items() if name not in (*_OF_AGENT, _SET)}
    try:
        loaded = config.load_config(EvalConfig, path, given=given)
        if of_agent or settings:
            of_file = {"name": loaded.agent.name} | loaded.agent.model_dump(exclude_unset=True)
            given["agent"] = agent_keys(of_file | of_agent, settings)
            loaded = config.load_config(EvalConfig, path, given=given)
        return loaded
    except config.ConfigError as error:
        if error.missing:
            raise ValueError(_MISSING[error.key]) from None
        if error.key.partition(".")[0] in given and error.key != "suite":  # the one that is an argument
            raise ValueError(f"{option_of(error.key)}: {error.problem}") from None
        raise


class EvalConfig(BaseModel):
    """One evaluation: a suite, a model, an agent. None means what the suite says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    suite: str
    """Name in memjax.eval.suites."""
    out: Path
    """Results directory; a killed run continues when it is started with the same one."""
    model: str | None = None
    """HF directory, .gguf file or hub id to run here; with `url`, the service's name for it."""
    url: str | None = None
    """OpenAI-compatible service to ask instead of a local model; its key comes from API_KEY."""
    tokenizer: str | None = None
    """HF directory or hub id that counts and cuts tokens; without it a service's tokens are estimated."""
    window: int | None = Field(None, ge=64)
    """Most tokens of prompt and reply together: what an agent may cut a text to, and the size of a local engine."""
    agent: AnyAgent = DEFAULT
    """Who reads; `suited_agent` is the one with the suite's budgets."""
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
    limits: Limits = Limits()
    """Bounds of a sample's episode; one that goes over them fails."""
    seed: int = 0
    """Of the tasks that are drawn and of the sampling."""
    concurrency: int = Field(8, ge=1)
    """Samples at a time, per replica with `ray`."""
    reward_seconds: float = Field(30.0, gt=0)
    """Seconds that a metric may take for one answer."""
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
    def suited_agent(self) -> AnyAgent:
        """The agent, with the suite's budgets where the config does not say otherwise; one of the user's as it is."""
        agent = self.agent
        if not isinstance(agent, AgentConfig):
            return agent
        fields = type(agent).model_fields.keys() - agent.model_fields_set
        return agent.model_copy(update={name: n for name, n in self.chosen.agent.items() if name in fields})

    def identity(self) -> dict[str, Any]:
        """Everything that a score may depend on, with the suite's defaults filled in; what a directory is compared by.

        Left out are where a service runs, how many samples are read at a time and on which machines, bounds, and the
        places of files: model and prompts are known by their hashes, and every task by its own.
        """
        fields = self.model_dump(
            mode="json", exclude={"out", "url", "concurrency", "reward_seconds", "ray", "model", "agent", "limits"}
        )
        suite = self.chosen
        fields["tasks"] = list(self.tasks or suite.tasks)
        fields["lengths"] = list(self.lengths or suite.lengths)
        fields["data"] = {name: path.name for name, path in self.data.items()}
        fields["samples"] = self.samples or suite.samples
        agent = self.suited_agent
        hashed = {"prompts"} if isinstance(agent, AgentConfig) else set()
        keys = agent.model_dump(mode="json", exclude=hashed)
        return fields | {f"agent.{name}": value for name, value in keys.items()}
