"""LangChain and litellm against the server, from an environment of their own.

python -m venv /tmp/clients && /tmp/clients/bin/pip install langchain-openai litellm
MEMJAX_CLIENTS=/tmp/clients/bin/python pytest -m clients
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from tests.serve.conftest import serving
from tests.serve.test_tools import TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.clients

SCRIPT = """
import json, sys
import litellm
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

base = sys.argv[1] + "/v1"
chat = ChatOpenAI(model="tiny", base_url=base, api_key="x", max_retries=0, max_tokens=4)
call = {"name": "double", "args": {"x": 1}, "id": "a", "type": "tool_call"}
history = [HumanMessage("Double 1."), AIMessage("", tool_calls=[call]), ToolMessage("2", tool_call_id="a")]
tool = {"type": "function", "function": {"name": "double", "parameters": {"type": "object", "properties": {}}}}
told = {"round_trip": chat.bind_tools([tool]).invoke(history).usage_metadata["output_tokens"]}
ask = {"api_base": base, "api_key": "x", "num_retries": 0, "max_tokens": 4, "temperature": None, "n": None}
long = [{"role": "user", "content": "The gardener kept the key. " * 150 + "\\n\\nWho kept the key?"}]
try:
    litellm.completion(model="openai/tiny", messages=long, **ask)
except litellm.ContextWindowExceededError:
    told["error"] = "context window"
names = {"openai/tiny": "openai/memory/tiny"}
reply = litellm.completion(model="openai/tiny", messages=long, context_window_fallback_dict=names, **ask)
told["fallback"] = reply.model
print(json.dumps(told))
"""


def test_langchain_s_tool_round_trip_and_litellm_s_fallback_to_the_reader(engine, loaded, tmp_path):
    python = os.environ.get("MEMJAX_CLIENTS")
    if not python:
        pytest.skip("MEMJAX_CLIENTS is not set: the first lines of this file say how to make it")
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    tokenizer = tiny_tokenizer(tmp_path / "tools", TEMPLATE)
    with serving(engine, replace(loaded, tokenizer=tokenizer), tmp_path / "state") as server:
        command = [python, "-c", SCRIPT, server.url]
        done = subprocess.run(command, env=os.environ | local, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert 1 <= told["round_trip"] <= 4
    assert told["error"] == "context window"
    assert told["fallback"].endswith("memory/tiny")
