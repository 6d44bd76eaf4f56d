"""One finished run, and what it compiled, for all tests of the loop: compiling is nearly all that a tiny run costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memjax.train.loop import train
from tests.train.tiny_run import FinishedRun, Witness, sharing_compiled, tiny_run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def finished(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that was left alone."""
    config, witness = tiny_run(tmp_path_factory.mktemp("runs") / "finished"), Witness()
    with sharing_compiled(compiled):
        model = train(config, witness)
    assert model is not None
    return FinishedRun(config, witness, model)
