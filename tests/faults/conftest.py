"""The same servers as in tests/serve."""

from tests.serve.conftest import engine, loaded, model_directory, server  # noqa: F401
