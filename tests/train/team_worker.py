"""What one of several processes does in the tests of a team: `python -m tests.train.team_worker TASK OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

from memjax.mesh import start_distributed


def gradients(out: Path) -> None:
    """The gradients and metrics of test_step on a mesh over both processes, and what they told one another."""
    import jax
    import numpy as np
    import pytest

    from memjax.mesh import make_mesh
    from memjax.train import team
    from memjax.train.learner import on_host, own_part
    from memjax.train.step import place
    from tests.train.test_step import batch_of, gradient_function, on_mesh, packed_step, parameters

    options = on_mesh(2, 2, 2)
    grads, metrics = gradient_function(options)(parameters(options), place(batch_of(packed_step()), options.layout))
    team._MOST_BYTES = 64
    words = [b"", b"x" * 1000][jax.process_index()]
    assert team.exchange(words) == [b"", b"x" * 1000]
    assert team.exchange(b"") == [b"", b""]
    assert team.anywhere(team.is_first())
    assert not team.anywhere(False)
    assert team.exchange(bytes(team.share_of(range(5)))) == [bytes([0, 2, 4]), bytes([1, 3])]

    def refuse() -> None:
        raise ValueError("not here")

    with pytest.raises(ValueError, match="not here"):
        team.by_the_first(refuse)
    assert own_part(options.layout.mesh).shape == {"data": 2, "fsdp": 1, "tensor": 2}
    with pytest.raises(ValueError, match="has no whole copy of the weights"):
        own_part(make_mesh(tensor=8))
    grads = on_host(grads)
    if team.is_first():
        leaves = {f"grad{i}": leaf for i, leaf in enumerate(jax.tree.leaves(grads))}
        np.savez(out, **leaves, **{name: np.asarray(value) for name, value in metrics.items()})


if __name__ == "__main__":
    start_distributed()
    {"gradients": gradients}[sys.argv[1]](Path(sys.argv[2]))
