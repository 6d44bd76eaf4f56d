"""While a batch is sampled beside an update, every program of the engine starts in turn with the learner's."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import jax
import numpy as np

from memjax.checkpoint import load_model
from memjax.rollout.scheduler import Scheduler
from memjax.rollout.shapes import EngineConfig
from memjax.train.turns import EngineInTurn
from memjax.trajectory import SamplingParams
from tests.tiny_model import write_tiny_model


def test_every_program_that_a_rollout_needs_starts_in_turn(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path / "model"))
    turn = threading.Lock()
    engine = EngineInTurn(
        loaded.params,
        loaded.config,
        loaded.options,
        EngineConfig.for_platform("cpu", 64, 4),
        vocabulary=loaded.tokenizer.size,
        eos_ids=loaded.tokenizer.eos_ids,
        turn=turn,
    )
    began: set[str] = set()
    unguarded: set[str] = set()
    program_of = engine.programs.get

    def watched(kind: str, *shape: int):
        def run(*arguments):
            began.add(kind)
            if not turn.locked():
                unguarded.add(kind)
            return program_of(kind, *shape)(*arguments)

        return run

    engine.programs.get = watched  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    with closing(Scheduler(engine, loaded.tokenizer)) as scheduler:
        prompts = [rng.integers(5, 90, length) for length in (6, 7, 9, 12, 50)]
        drawn = SamplingParams(max_tokens=3, seed=1)
        futures = [scheduler.submit(ids.tolist(), drawn, shared=shared) for ids in prompts for shared in (0, 4)]
        for future in futures:
            jax.block_until_ready(future.result(timeout=120)[0].logprobs)
    assert {"decode", "draw", "insert", "prefill", "prefill_rows"} <= began
    # A state without a live slot is made by each device for itself.
    assert unguarded <= {"state"}
