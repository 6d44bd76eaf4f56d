#!/usr/bin/env bash
# The one check that people and CI run: style, types, import contracts, tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
uv run --no-sync ruff check .
uv run --no-sync ruff format --check .
uv run --no-sync mypy
uv run --no-sync lint-imports
uv run --no-sync pytest "$@"
