"""What a disk does to a run costs it what was written there, never the run: it is told, counted, and gone on from."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from memjax.checkpoint.store import TrainStore
from memjax.metrics import MetricsLog, read_metrics
from memjax.train.logs import Unwritten
from memjax.train.run import Position, Run, last_whole
from tests.train.tiny_run import Witness, tiny_run

POSITION = {"stage": 0, "step": 0, "tasks": 0}


def state_of(step: int) -> dict[str, jax.Array]:
    return {"x": jnp.full((16, 16), float(step)), "y": jnp.arange(3)}


def filled(directory: Path) -> Path:
    with TrainStore(directory, keep=3) as store:
        for step in (1, 2):
            store.save(step, state_of(step), POSITION | {"step": step})
    return directory


def read(directory: Path, say: list[str]) -> tuple[dict[str, jax.Array], dict[str, int]] | None:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
    with TrainStore(directory, clean=False) as store:
        return last_whole(store, abstract, say.append)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the readers that Orbax leaves
@pytest.mark.parametrize("harm", ["half", "gone"])
def test_any_file_of_the_latest_checkpoint_may_be_damaged(tmp_path: Path, harm: str) -> None:
    whole = filled(tmp_path / "whole")
    files = sorted(path.relative_to(whole) for path in (whole / "2").rglob("*") if path.is_file())
    passed_over = 0
    for name in files:
        shutil.rmtree(tmp_path / "hurt", ignore_errors=True)
        file = shutil.copytree(whole, tmp_path / "hurt") / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if harm == "half" else file.unlink()
        said: list[str] = []
        found = read(tmp_path / "hurt", said)
        assert found is not None
        reached = found[1]["step"]
        assert jnp.all(found[0]["x"] == reached), name
        assert bool(said) == (reached == 1), name
        passed_over += reached == 1
    assert passed_over > 0


def test_the_last_whole_checkpoint_is_used_and_the_damaged_one_named(tmp_path: Path) -> None:
    directory = filled(tmp_path / "checkpoints")
    (directory / "3").mkdir()
    for file in (directory / "2" / "state").iterdir():
        file.unlink() if file.is_file() else shutil.rmtree(file)
    said: list[str] = []
    found = read(directory, said)
    assert found is not None
    assert found[1]["step"] == 1
    assert len(said) == 1
    assert str(directory / "2") in said[0]
    assert said[0].endswith("GOING ON FROM CHECKPOINT 1")
    shutil.rmtree(directory / "1" / "state")
    with pytest.raises(ValueError, match=rf"{directory / '2'} .*{directory / '1'} .*remove these directories"):
        read(directory, said)


def test_a_run_moves_the_damaged_checkpoint_aside_and_drops_its_lines(tmp_path: Path) -> None:
    config, witness = tiny_run(tmp_path / "run"), Witness()
    filled(config.out / "checkpoints")
    (config.out / "checkpoints" / "7").mkdir()
    shutil.rmtree(config.out / "checkpoints" / "2" / "state")
    with MetricsLog(config.out / "metrics.jsonl") as log:
        for step in (1, 2):
            log.write(step, {"stage": "rl"})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
    with Run(config, witness, threading.Event()) as run:
        found = run.restore(abstract)  # type: ignore[arg-type]
        assert found is not None
        assert found[1] == Position(0, 1, 0)
    assert (config.out / "damaged" / "2").is_dir()
    assert [path.name for path in (config.out / "checkpoints").iterdir() if path.name.isdecimal()] == ["1"]
    assert [row["step"] for row in read_metrics(config.out / "metrics.jsonl")] == [1]
    assert any("damaged checkpoint 2" in message for message in witness.said)


def test_a_line_that_the_disk_takes_in_part_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, witness = tiny_run(tmp_path / "run"), Witness()
    with Run(config, witness, threading.Event()) as run:
        run.note(Position(0, 1, 0), {"a": 1.0})
        (log,) = run._logs  # the file behind it is what a full disk would change
        assert isinstance(log, MetricsLog)
        whole = log._file

        class Full:
            def fileno(self) -> int:
                return whole.fileno()

            def write(self, line: bytes) -> int:
                return os.write(whole.fileno(), line[:5])

        monkeypatch.setattr(log, "_file", Full())
        run.note(Position(0, 2, 0), {"a": 2.0})
        run.note(Position(0, 3, 0), {"a": 3.0})
        monkeypatch.setattr(log, "_file", whole)
        run.note(Position(1, 2, 0), {"a": 4.0})
    rows = list(read_metrics(config.out / "metrics.jsonl"))
    assert [row["a"] for row in rows] == [1.0, 4.0]
    assert rows[-1]["disk/failed_writes"] == 2
    assert sum("COULD NOT BE WRITTEN" in message for message in witness.said) == 1


def test_each_kind_of_failure_is_said_once_and_all_are_counted() -> None:
    said: list[str] = []
    unwritten = Unwritten(said.append)
    for what in ("A", "B", "A"):
        with unwritten.guarding(what):
            raise OSError(28, "No space left on device")
    assert (unwritten.count, len(said)) == (3, 2)
    with pytest.raises(ValueError, match="not the disk"), unwritten.guarding("A"):
        raise ValueError("not the disk")
