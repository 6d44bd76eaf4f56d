"""The objective of the learner as one frozen config, and published recipes as values of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AdvantageKind = Literal["mean", "mean_std", "leave_one_out"]
Aggregation = Literal["token", "trajectory", "conversation", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


class ObjectiveConfig(BaseModel):
    """What is maximised. The defaults are Eq. 5 of the MemAgent paper (arXiv 2507.02259) without its KL term."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    advantage: AdvantageKind = "mean"
    """Reward minus the group's mean; that over the group's deviation; or minus the mean of the other samples."""
    aggregation: Aggregation = "token"
    """What counts equally in the loss: each token, trajectory or conversation; `constant`: sums over a fixed length."""
    constant_tokens: int = Field(default=1024, ge=1)
    """Tokens by which `aggregation: constant` divides each trajectory's sum, whatever its length."""
    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal, for others to be drawn in their place."""

    clip_low: float = Field(default=0.2, gt=0)
    """How far below 1 the probability ratio may fall before its gradient stops."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the probability ratio may rise before its gradient stops."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Largest ratio that a negative advantage is multiplied with; null for no bound."""
    ratio: Literal["token", "conversation"] = "token"
    """Whether each token has its own ratio or shares the geometric mean over its conversation (GSPO)."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence, in nats, from the frozen reference; 0 needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """Divergence per token: log ratio, half its square, or unbiased and positive. k1 in the loss averages to none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the divergence to the loss per token, or subtract its sum over a trajectory from the reward."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in nats per token."""

    old_logprobs: Literal["rollout", "learner"] = "rollout"
    """Denominator of the ratio: what the sampler reported, or a pass of the learner before the first update."""
    importance: Literal["none", "token", "trajectory"] = "none"
    """Weigh by learner over sampler probability, per token or over all sampled tokens of a trajectory."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest such weight."""

    overlong_limit: int | None = Field(default=None, ge=1)
    """Sampled tokens in one conversation at which the over-length penalty is complete; null: the agent's budget."""
    overlong_buffer: int | None = Field(default=0, ge=0)
    """Tokens before the limit over which the penalty rises linearly; 0 turns it off, null is a fifth of the limit."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward taken from a trajectory whose longest conversation reaches the limit."""
    step_credit: float = Field(default=0.0, ge=0, le=1)
    """Share of step rewards in the advantages, each compared with its group's at the same step; 0 ignores them."""
    mask_truncated: bool = False
    """Train on no token of a conversation that was cut at its token limit."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ObjectiveConfig:
        if self.importance != "none" and self.old_logprobs != "learner":
            raise ValueError(
                f"importance: {self.importance} compares learner and sampler, so it needs old_logprobs: learner"
            )
        if self.overlong_limit is not None:
            self.buffer_for(self.overlong_limit)
        return self

    def buffer_for(self, limit: int) -> int:
        """`overlong_buffer` as a number; ValueError where it exceeds the limit."""
        if self.overlong_buffer is None:
            return max(1, round(limit / 5))
        if self.overlong_buffer > limit:
            raise ValueError(f"overlong_buffer ({self.overlong_buffer}) must not exceed overlong_limit ({limit})")
        return self.overlong_buffer

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the frozen reference are wanted."""
        return self.kl_coef > 0

    @property
    def reference_in_loss(self) -> bool:
        """Whether the loss itself reads the reference."""
        return self.kl_coef > 0 and self.kl_in == "loss"


PRESETS: Mapping[str, ObjectiveConfig] = MappingProxyType(
    {
        # run_memory_7B.sh and run_memory_14B.sh of MemAgent
        "memagent-script": ObjectiveConfig(kl_coef=0.001, old_logprobs="learner"),
        # arXiv 2503.14476, whose over-length buffer of 4,096 tokens is a fifth of its limit of 20,480
        "dapo": ObjectiveConfig(
            advantage="mean_std", clip_high=0.28, dual_clip=None, dynamic_sampling=True, overlong_buffer=None
        ),
        # arXiv 2402.03300, Eq. 3
        "grpo": ObjectiveConfig(advantage="mean_std", aggregation="trajectory", dual_clip=None, kl_coef=0.04),
        # arXiv 2503.20783: neither the deviation nor the own length enters
        "dr-grpo": ObjectiveConfig(aggregation="constant", dual_clip=None),
        # arXiv 2507.18071
        "gspo": ObjectiveConfig(
            advantage="mean_std",
            aggregation="conversation",
            ratio="conversation",
            clip_low=3e-4,
            clip_high=4e-4,
            dual_clip=None,
            old_logprobs="learner",
        ),
        # arXiv 2402.14740: a whole trajectory is one action, and the divergence is part of its reward; its coefficient
        # depends on the task there, 0.05 is the default of TRL's RLOO trainer
        "rloo": ObjectiveConfig(
            advantage="leave_one_out",
            aggregation="constant",
            dual_clip=None,
            kl_coef=0.05,
            kl_estimator="k1",
            kl_in="reward",
        ),
    }
)


def preset(name: str) -> ObjectiveConfig:
    """The objective of that name."""
    if name not in PRESETS:
        raise ValueError(f"no objective is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def within_budgets(objective: ObjectiveConfig, agent: object) -> ObjectiveConfig:
    """The objective with numbers for its over-length penalty, where it has one, from the agent's reply budgets.

    Those are the numbers under `memory`, `answer` and `conversation`, the last one for agents with several
    replies in a conversation. ValueError where there is none to take the limit from, or none that can reach it.
    """
    if objective.overlong_buffer == 0:
        return objective
    given = {name: getattr(agent, name, None) for name in ("memory", "answer", "conversation")}
    budgets = {name: value for name, value in given.items() if type(value) is int}
    limit, largest = objective.overlong_limit, max(budgets.values(), default=None)
    if limit is None and largest is None:
        raise ValueError(
            "overlong_limit is null, which takes the agent's budget for memory or answer, but this agent has neither: "
            "set it to a number of tokens, or overlong_buffer to 0 for no over-length penalty"
        )
    if limit is not None and largest is not None and limit > largest:
        told = ", ".join(f"{name} {value}" for name, value in budgets.items())
        raise ValueError(
            f"overlong_limit ({limit}) is more than the agent's budgets allow ({told}), so nothing would reach it: "
            "lower it, or leave it out to take the largest of them"
        )
    limit = limit or largest
    assert limit is not None
    return objective.model_copy(update={"overlong_limit": limit, "overlong_buffer": objective.buffer_for(limit)})
