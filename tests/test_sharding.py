"""Meshes, and logical axes on them."""

from dataclasses import dataclass

import jax
import pytest
from jax.sharding import PartitionSpec

from memjax.mesh import make_mesh, start_distributed
from memjax.sharding import ROLLOUT, TRAIN, Layout, Rules


def test_one_size_of_a_mesh_may_be_the_rest():
    assert dict(make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(devices=jax.devices()[:1]).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize("sizes", [(3, 1, 1), (2, 2, 1), (-1, 3, 1), (-1, -1, 1), (0, 1, 1)])
def test_a_mesh_that_does_not_cover_the_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="mesh"):
        make_mesh(*sizes)


def test_weights_are_split_over_fsdp_in_training_only():
    mesh = make_mesh(2, 2, 2)
    assert Layout(mesh, TRAIN).spec(("ffn", "embed"), (96, 64)) == PartitionSpec("tensor", "fsdp")
    assert Layout(mesh, ROLLOUT).spec(("ffn", "embed"), (96, 64)) == PartitionSpec("tensor", None)


def test_an_axis_is_whole_where_its_units_do_not_divide():
    layout = Layout(make_mesh(1, 1, 8))
    assert layout.spec(("kv_heads",), (2,)) == PartitionSpec(None)
    assert layout.spec(("kv_heads",), (8,)) == PartitionSpec("tensor")
    batch = Layout(make_mesh(2, 4, 1))
    assert batch.spec(("batch",), (2,)) == PartitionSpec("data")  # as far as it goes
    assert batch.spec(("batch",), (8,)) == PartitionSpec(("data", "fsdp"))


def test_two_axes_on_one_mesh_axis_and_unknown_axes_are_refused():
    layout = Layout(make_mesh(1, 1, 8))
    with pytest.raises(ValueError, match=r"'ffn' and 'vocab'.*'tensor'"):
        layout.spec(("ffn", "vocab"), (96, 96))
    with pytest.raises(ValueError, match="no sharding rule for axis 'rows'"):
        Layout(layout.mesh, Rules()).spec(("rows",), (8,))


def test_one_process_needs_no_start_and_half_a_job_is_refused(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "MEMJAX_DISTRIBUTED"):
        monkeypatch.delenv(name, raising=False)
    start_distributed()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES"):
        start_distributed()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    start_distributed()
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID 2"):
        start_distributed()


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


def test_the_devices_of_one_process_are_neighbours_on_the_last_axis():
    # As on a TPU slice, where ids run along rows that cross the hosts.
    devices = [FakeDevice(id=i, process_index=i // 2 % 2) for i in range(8)]
    mesh = make_mesh(data=2, tensor=4, devices=devices)
    assert [[device.id for device in row] for row in mesh.devices[:, 0]] == [[0, 1, 4, 5], [2, 3, 6, 7]]
