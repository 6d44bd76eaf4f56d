"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def two_nodes(*paths: str) -> Iterator[tuple[Any, Any]]:
    """A cluster that this process is connected to, and the node of it that may die; `paths` can be imported from."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    path = os.pathsep.join([os.getcwd(), *paths])
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()
