"""The blocks of docs/tools.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memjax.episodes.run import run_episode
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.trajectory import SamplingParams, Task

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "tools.md").read_text(), re.DOTALL)


async def run(block: str, name: str, reply: Any) -> Any:
    defined: dict[str, Any] = {}
    exec(block, defined)
    client = ScriptedClient(reply)
    return await run_episode(defined[name], Task("1", "q", ""), client, ByteTokenizer(), SamplingParams(seed=1))


async def test_the_guesser_finds_the_number() -> None:
    low, high, last = 0, 99, 50

    def halving(prompt: str, params: SamplingParams) -> str:
        nonlocal low, high, last
        if "Higher" in prompt:
            low = last + 1
        elif "Lower" in prompt:
            high = last - 1
        last = (low + high) // 2
        return str(last)

    trajectory = await run(BLOCKS[0], "guesser", halving)
    assert trajectory.error is None
    assert 0 < trajectory.counters["model_calls"] <= 7


async def test_the_agent_for_openais_client_answers() -> None:
    trajectory = await run(BLOCKS[1], "agent", lambda prompt, params: "Because.")
    assert (trajectory.answer, trajectory.error) == ("Because.", None)
