"""Write docs/configuration.md anew from the configs: `uv run python scripts/configuration.py`."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from memjax.config_keys import REQUIRED, sections_of
from memjax.eval.config import EvalConfig
from memjax.train.config import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
ABOUT = """# Configuration

Every key that a config may hold. This page is made by `uv run python scripts/configuration.py` from the docstrings of
the configs: change those.

A config is a YAML file; `KEY=VALUE` with dots goes over it, with the value as YAML: `rollout.groups=8` or
`log=[tensorboard]`. Where a name has an `N`, the section is a list, and `rewards.0.weight=2` sets a value of its first
entry. A key that does not exist, and a value of another type or outside its bounds, are refused before anything is
loaded. `memjax train keys [PREFIX]` shows the keys of training in the terminal. Rewards are explained in
[rewards.md](rewards.md).
"""


def page() -> str:
    """The whole document."""
    return "\n".join([ABOUT, *tables("Training", TrainConfig), *tables("Evaluation", EvalConfig)])


def tables(title: str, config: type[BaseModel]) -> Iterator[str]:
    """A heading and a table for each section of a config."""
    yield f"## {title}\n"
    for section in sections_of(config):
        if section.name:
            yield f"### `{section.name}`{f', {section.variant}' if section.variant else ''}\n"
        yield f"{section.about}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for key in section.keys:
            default = f"`{key.default}`" if key.default not in ("", REQUIRED) else key.default
            yield " | ".join(["| `" + key.name + "`", key.type.replace("|", "\\|"), default, key.meaning]) + " |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
