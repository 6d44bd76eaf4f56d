"""Evaluation: suites of tasks, a runner that survives being killed, and reports that say how sure they are. No jax."""
