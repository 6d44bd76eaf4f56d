"""A client over an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from memjax.checkpoint import LoadedModel, load_model
from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions, Qwen2Config, default_param_dtype
from memjax.rollout.client import Prompt
from memjax.rollout.engine import Engine, EngineConfig
from memjax.rollout.scheduler import ANYONE, Caller, Counters, OnToken, Scheduler
from memjax.sharding import ROLLOUT, Layout
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams

_USUAL_LENGTH = 8192  # a chunk of 5000, a memory and an answer of 1024, and the question


class LocalClient:
    """Completes prompts on an engine of its own. Close it, or use it in `async with`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, model: str, prefix_capacity: int | None = None):
        self.model, self.window = model, engine.max_length
        self.engine, self.tokenizer = engine, tokenizer
        self.scheduler = Scheduler(engine, tokenizer, prefix_capacity=prefix_capacity)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        max_length: int | None = None,
        slots: int | None = None,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
    ) -> LocalClient:
        """Load a model directory, .gguf file or hub id onto `mesh` (by default one device).

        `max_length` is the window in tokens (at most the model's; by default 8192 or less), `slots` the prompts that
        are decoded side by side, `dtype` that of the weights (by default what the platform multiplies fastest).
        Raises ValueError for what cannot be run.
        """
        mesh = mesh or make_mesh(devices=jax.devices()[:1])
        platform = mesh.devices.flat[0].platform
        dtype = default_param_dtype() if dtype is None else dtype
        # CPUs add and exponentiate in float32 whatever the weights are.
        options = ModelOptions(
            param_dtype=dtype,
            compute_dtype=jnp.float32 if platform == "cpu" else dtype,
            scan_layers=platform != "cpu",
            layout=Layout(mesh, ROLLOUT),
        )
        loaded = load_model(model, options)
        config = EngineConfig.for_platform(platform, _window(loaded.config, max_length), slots)
        return cls(make_engine(loaded, config), loaded.tokenizer, model=loaded.source.name)

    @property
    def counters(self) -> Counters:
        """What the scheduler has done so far."""
        return self.scheduler.counters

    @property
    def slots(self) -> int:
        """Replies that are decoded side by side."""
        return self.engine.max_concurrent_decodes

    @property
    def running(self) -> int:
        """Slots in use."""
        return self.scheduler.running

    @property
    def failure(self) -> str | None:
        """Why nothing can be submitted any more; None while the engine works."""
        return self.scheduler.failure

    @property
    def compilations(self) -> int:
        """Programs that were compiled after the warm-up."""
        return self.engine.compilations

    @property
    def weights_version(self) -> int:
        """Of the weights that run."""
        return self.engine.weights.current.version

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program ahead, reporting (done, all of them); without it, each when it is first needed."""
        self.engine.warm_up(progress)

    async def complete(
        self, prompt: Prompt, params: SamplingParams, on_token: OnToken | None = None, caller: Caller = ANYONE
    ) -> list[Completion]:
        """Draw `params.n` completions; `on_token` is called from the engine's thread."""
        rendered = self.tokenizer.render_prompt(prompt)
        future = self.submit(rendered.ids, params, shared=rendered.shared, on_token=on_token, caller=caller)
        return await asyncio.wrap_future(future)

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        shared: int = 0,
        on_token: OnToken | None = None,
        caller: Caller = ANYONE,
    ) -> Future[list[Completion]]:
        """As the scheduler's."""
        return self.scheduler.submit(ids, params, shared=shared, on_token=on_token, caller=caller)

    async def load_weights(self, directory: Path, version: int | None = None) -> int:
        """Run the weights of another checkpoint of the same model, and return their version; ValueError for others."""
        loaded = await asyncio.to_thread(load_model, directory, self.engine.options)
        if loaded.config != self.engine.model:
            raise ValueError(f"{directory} holds a model of another shape or kind than the one that is served")
        return await self.swap_weights(loaded.params, version)

    async def swap_weights(self, params: Any, version: int | None = None) -> int:
        """Run other weights from the next step on, and return their version."""
        return await asyncio.wrap_future(self.scheduler.swap_weights(params, version))

    async def close(self) -> None:
        """Fail what is under way and let go of the engine."""
        await asyncio.to_thread(self.scheduler.close)

    async def __aenter__(self) -> LocalClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def make_engine(loaded: LoadedModel, config: EngineConfig) -> Engine:
    """The engine for a loaded model."""
    return Engine(
        loaded.params,
        loaded.config,
        loaded.options,
        config,
        vocabulary=loaded.tokenizer.size,
        eos_ids=loaded.tokenizer.eos_ids,
        tokenizer=loaded.tokenizer,
    )


def _window(config: Qwen2Config, wanted: int | None) -> int:
    trained = config.trained_window
    if wanted is None:
        return min(trained, _USUAL_LENGTH)
    if wanted > trained:
        raise ValueError(f"max_length {wanted} is past the model's window of {trained} tokens")
    return wanted
