"""The learner: advantages, packing, losses and the sharded update."""
