"""What runs the model for the server: one engine in its process, or several behind the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import jax

from memjax.mesh import make_mesh
from memjax.rollout.client import Client
from memjax.rollout.local import LocalClient
from memjax.rollout.scheduler import ANYONE, Caller, Counters, OnToken
from memjax.serve.settings import ServeSettings
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams


class Backend(Client, Protocol):
    """A client that also takes rendered prompts, tells how it stands, and can be given other weights."""

    tokenizer: Tokenizer

    @property
    def window(self) -> int:
        """The most tokens, prompt and completion together."""
        ...

    @property
    def slots(self) -> int:
        """Replies that it decodes side by side."""
        ...

    @property
    def running(self) -> int:
        """Slots in use."""
        ...

    @property
    def failure(self) -> str | None:
        """Why nothing can be submitted any more; None while it works."""
        ...

    @property
    def counters(self) -> Counters:
        """What it has done so far."""
        ...

    @property
    def compilations(self) -> int:
        """Programs that were compiled after the warm-up."""
        ...

    @property
    def weights_version(self) -> int:
        """Of the weights that run."""
        ...

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        shared: int = 0,
        on_token: OnToken | None = None,
        caller: Caller = ANYONE,
    ) -> Future[list[Completion]]:
        """Queue a prompt, from any thread; cancelling the future frees what it holds.

        ValueError for a prompt that cannot fit, at once or from the future; ClientError where the engine fails.
        """
        ...

    def warm_up(self) -> None:
        """Compile every program ahead."""
        ...

    async def load_weights(self, directory: Path, version: int | None = None) -> int:
        """Run the weights of another checkpoint of the same model, and return their version; ValueError for others."""
        ...


def load_client(settings: ServeSettings) -> LocalClient:
    """The model on the devices of this process."""
    devices = jax.devices()
    if settings.tensor > len(devices):
        raise ValueError(f"tensor is {settings.tensor}, but there are {len(devices)} devices")
    return LocalClient.load(
        settings.model,
        max_length=settings.max_length,
        slots=settings.slots,
        dtype=settings.dtype,
        mesh=make_mesh(tensor=settings.tensor, devices=devices[: settings.tensor]),
    )
