"""Agents of one's own are named by their file, have keys, survive being kept, and are refused in a sentence."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memjax.agents.__main__ import app
from memjax.agents.registry import agent_keys, own_class
from memjax.ask import AskSettings
from memjax.cli import app as memjax
from memjax.config import load_config
from memjax.eval.config import EvalConfig
from memjax.eval.config import load_config as load_eval
from memjax.rollout.client import ClientError
from memjax.serve.settings import read_settings
from memjax.train.config import TrainConfig, as_json, refuse_other_run
from tests.episodes.drive import drive, scripted, task

EXAMPLES = Path(__file__).parents[2] / "examples"

GOOD = '''
from pydantic import BaseModel, ConfigDict, Field

class Reader(BaseModel):
    """Reads."""
    model_config = ConfigDict(frozen=True)
    chunk: int = Field(default=100, ge=16)
    bullets: int = 3
    async def __call__(self, task, episode):
        return f"{self.chunk} {self.bullets}"

small = Reader(bullets=1)

async def plain(task, episode):
    return (await episode.chat(task.question, max_tokens=8)).text
'''

BAD = """
from pydantic import BaseModel
from memjax.rollout.client import Message, Prompt, ToolCall

def not_async(task, episode): return ""
async def one_argument(task): return ""
class NoModel: pass
class NoCall(BaseModel): pass
class NotAsync(BaseModel):
    def __call__(self, task, episode): return ""
class Named(BaseModel):
    name: str = ""
    async def __call__(self, task, episode): return ""
number = 5

async def no_text(task, episode): return 5
async def raises(task, episode): return {}["missing"]
async def never_stops(task, episode):
    while True:
        await episode.chat("more", max_tokens=4)
async def odd_notes(task, episode): await episode.chat("x", max_tokens=4, notes={"time": object()})
async def too_long(task, episode): await episode.chat("x" * 5000, max_tokens=4)
def tool(about): return {"type": "function", "function": {"name": "look", "description": about, "parameters": {}}}
async def many_words(task, episode):
    return (await episode.chat(Prompt((Message("user", ("x",)),), tools=(tool("word " * 3000),)), max_tokens=4)).text
async def other_tool(task, episode):
    from random import random
    return (await episode.chat(Prompt((Message("user", ("x",)),), tools=(tool(f"{random():.6f}"),)), max_tokens=4)).text
async def other_call(task, episode):
    from random import random
    called = Message("assistant", (), (ToolCall("1", "look", {"at": f"{random():.6f}"}),))
    messages = Message("user", ("x",)), called, Message("tool", ("y",), tool_call_id="1")
    return (await episode.chat(Prompt(messages, tools=(tool("looks"),)), max_tokens=4)).text
async def forgetful(task, episode):
    import random
    return (await episode.chat(str(random.random()), max_tokens=4)).text
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    own_class.cache_clear()
    return tmp_path


@pytest.mark.parametrize("name", ["good.py:Reader", "good.py:small", "good.py:plain", "good:Reader"])
def test_what_is_kept_of_an_agent_is_its_name_and_keys_and_loads_again(place, name):
    settings = load_config(AskSettings, overrides=[f"agent.name={name}"])
    kept = settings.model_dump(mode="json")
    assert kept["agent"]["name"] == name  # as it was given: a relative path resumes in the same directory
    assert AskSettings.model_validate(json.loads(json.dumps(kept))) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


async def test_keys_reach_the_agent_and_an_instance_has_its_values_as_defaults(place):
    chosen = load_config(AskSettings, overrides=["agent.name=good.py:Reader", "agent.chunk=20"]).agent
    assert (await drive(chosen, task(), scripted())).answer == "20 3"
    small = load_config(AskSettings, overrides=["agent.name=good.py:small", "agent.chunk=20"]).agent
    assert (await drive(small, task(), scripted())).answer == "20 1"
    assert (await drive(own_class("good.py:plain")(), task(), scripted(lambda *_: "said"))).answer == "said"


def test_a_pickle_loads_in_a_process_that_never_saw_the_file(place):
    data = pickle.dumps(load_config(AskSettings, overrides=["agent.name=good.py:Reader", "agent.bullets=9"]))
    (place / "settings.pickle").write_bytes(data)
    program = "import pickle; print(pickle.load(open('settings.pickle', 'rb')).agent.bullets)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "9\n"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["agent.name=good.py:Reader", "agent.bulets=1"], "did you mean agent.bullets?"),
        (["agent.name=good.py:Reader", "agent.memory=1"], "unknown config key agent.memory"),
        (["agent.name=good.py:Reader", "agent.chunk=3"], "agent.chunk: Input should be greater than or equal to 16"),
        (["agent.name=good.py:plain", "agent.chunk=30"], "unknown config key agent.chunk"),
        (["agent.name=good.py:Reder"], "did you mean Reader?"),
        (["agent.name=gone.py:f"], "there is no file gone.py"),
        (["agent.name=no_such_module:f"], "there is no module no_such_module"),
        (["agent.name=good"], "choose one of memagent, single"),
        (["agent.name=bad.py:not_async"], "bad.py:not_async is not async"),
        (["agent.name=bad.py:one_argument"], "takes (task), but an agent is called with a task and its episode"),
        (["agent.name=bad.py:NoModel"], "derive it from pydantic.BaseModel"),
        (["agent.name=bad.py:NoCall"], "has no __call__"),
        (["agent.name=bad.py:NotAsync"], "bad.py:NotAsync is not async"),
        (["agent.name=bad.py:Named"], "has a key `name`"),
        (["agent.name=bad.py:number"], "is a int, not an agent"),
    ],
    ids=str,
)
def test_what_is_no_agent_or_no_key_is_refused_in_a_sentence(place, overrides, says):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (the sentence is looked at)
        load_config(AskSettings, overrides=overrides)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_text", "the agent returned int, not the answer as a str"),
        ("raises", "KeyError: 'missing'"),
        ("never_stops", "the agent made more than 256 calls"),
        ("odd_notes", "the journal keeps the notes of a call as JSON"),
        ("too_long", "more than the window of 1000"),
    ],
)
async def test_what_an_agent_does_wrong_ends_its_episode_with_a_sentence(place, name, says):
    assert says in (await drive(own_class(f"bad.py:{name}")(), task(), scripted(window=1000))).error


def test_any_key_is_set_on_a_command_line():
    name = f"{EXAMPLES}/bullets.py:Bullets"
    assert agent_keys({"name": name, "chunk": 100}, ["bullets=5"]) == {"name": name, "chunk": 100, "bullets": 5}
    with pytest.raises(ValueError, match="no key 'bulets': did you mean bullets"):
        agent_keys({"name": name}, ["bulets=5"])
    with pytest.raises(ValueError, match=r"--layout: the agent .*Bullets has no such setting"):
        agent_keys({"name": name, "layout": "chunk_first"})
    with pytest.raises(ValueError, match="--set takes KEY=VALUE, got 'bullets'"):
        agent_keys({"name": name}, ["bullets"])


def test_an_evaluation_is_told_apart_by_the_agent_and_its_keys(place):
    given = {"suite": "smoke", "out": "out", "agent": "good.py:Reader"}
    plain, other = load_eval(None, given), load_eval(None, given | {"agent_settings": ["bullets=7"]})
    assert plain.identity()["agent.name"] == "good.py:Reader"
    assert (plain.identity()["agent.bullets"], other.identity()["agent.bullets"]) == (3, 7)
    assert plain.suited_agent.chunk == 100  # not the suite's: nobody knows what its keys mean
    edited = (place / "good.py").read_text().replace("Reads.", "Reads on.")
    (place / "edited.py").write_text(edited)
    hashes = [own_class(f"{name}.py:Reader")().prompt_hash for name in ("good", "edited")]
    assert None not in hashes and hashes[0] != hashes[1]  # noqa: PT018  (prompts are in the code)
    assert EvalConfig.model_validate(other.model_dump(mode="json")) == other


def test_a_training_run_goes_on_with_the_same_agent_only(place):
    def config(*keys):
        values = {"out": "out", "model": "tiny", "steps": 1, "data": {"tiny": {}}}
        return load_config(TrainConfig, overrides=["agent.name=good.py:Reader", *keys], given=values)

    before = json.loads(json.dumps(as_json(config())))
    refuse_other_run(before, config("limits.calls=9"))
    with pytest.raises(ValueError, match=r"holds a run with agent\.bullets = 3, not 4"):
        refuse_other_run(before, config("agent.bullets=4"))


def test_a_server_keeps_the_whole_path_of_its_agent(place):
    settings = read_settings(None, {"model": "m", "agent": "good.py:Reader"}, ["bullets=4"])
    assert settings.agent.name == f"{place}/good.py:Reader"
    assert settings.agent.bullets == 4
    assert settings.agent.model_fields_set == {"name", "bullets"}  # the others may still be fitted or chosen


def test_a_scripted_reader_of_one_s_own_is_checked(place):
    def config(name):
        stage = {"name": "s", "kind": "demonstrations", "steps": 1, "policies": {name: 1.0}}
        values = {"out": "out", "model": "tiny", "steps": 1, "data": {"tiny": {}}, "supervised": [stage]}
        return load_config(TrainConfig, given=values)

    assert config(f"{EXAMPLES}/bullets_script.py:careful").supervised[0].policies
    with pytest.raises(ValueError, match=r"does not define carefull, the scripted reader .* did you mean careful"):
        config(f"{EXAMPLES}/bullets_script.py:carefull")
    with pytest.raises(ValueError, match="is no scripted reader"):
        config("bad.py:number")
    with pytest.raises(ValueError, match="no scripted reader is called 'orakle'"):
        config("orakle")


@pytest.mark.parametrize(
    "name", ["bullets.py:Bullets", "stops_early.py:StopsEarly", "map_reduce.py:map_reduce"], ids=str
)
def test_the_examples_pass_their_check(name):
    done = CliRunner().invoke(app, ["check", f"{EXAMPLES}/{name}"])
    assert done.exit_code == 0, done.output
    assert done.output.endswith("fine\n")


def test_a_check_counts_what_was_asked(place):
    done = CliRunner().invoke(app, ["check", f"{EXAMPLES}/bullets.py:Bullets", "--set", "chunk=500", "--set", "new=20"])
    assert "short replies: 4 calls" in done.output
    assert [line.split()[:2] for line in done.output.splitlines() if " bullets " in line][:3] == [
        ["1", "bullets"],
        ["2", "bullets"],
        ["3", "bullets"],
    ]
    assert "longest call: " in done.output
    assert " + 20 = " in done.output or " + 512 = " in done.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("forgetful", "run again it asked something else in call 1 (turn), so it could not be resumed"),
        ("never_stops", "with short replies it failed: the agent made more than 256 calls"),
        ("too_long", "do not fit the window of 1000"),
        ("many_words", "do not fit the window of 1000"),
        ("other_tool", "run again it asked something else in call 1 (turn)"),
        ("other_call", "run again it asked something else in call 1 (turn)"),
        ("raises", "it failed: KeyError"),
    ],
)
def test_a_check_says_what_is_wrong(place, name, says):
    done = CliRunner().invoke(app, ["check", f"bad.py:{name}", "--window", "1000"])
    assert done.exit_code == 1
    assert says in done.output
    assert "fine" not in done.output


def test_a_check_refuses_what_is_no_agent(place):
    done = CliRunner().invoke(app, ["check", "bad.py:not_async"])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)


def test_the_built_in_agents_are_listed_with_their_keys():
    done = CliRunner().invoke(memjax, ["agents"])
    assert done.exit_code == 0
    assert "memagent: Reads with one turn per chunk" in done.output
    assert "    chunk: 5000  Document tokens read in one turn." in done.output


async def test_the_list_of_bullets_loses_its_oldest_and_keeps_the_very_tokens(place):
    replies = iter(["- one\n- two", "none", "- three", "\\boxed{three}"])
    client = scripted(lambda *_: next(replies))
    agent = own_class(f"{EXAMPLES}/bullets.py:Bullets")(chunk=100, bullets=15)
    trajectory = await drive(agent, task("x" * 300), client)
    assert trajectory.answer == "\\boxed{three}"
    (last,) = client.prompts[-1].messages
    parts = [bytes(part).decode() for part in last.content if not isinstance(part, str)]
    assert parts == ["- three"]  # the eleven bytes of the first went, as ids the seven of the last stay


async def test_reading_stops_early_and_the_map_is_reduced(place):
    early = own_class(f"{EXAMPLES}/stops_early.py:StopsEarly")(chunk=100)
    client = scripted(lambda prompt, params: "ANSWER: 42" if "zzz" in prompt else "nothing yet")
    trajectory = await drive(early, task("x" * 150 + "zzz" + "y" * 500), client)
    assert (trajectory.answer, trajectory.counters["stopped_early"]) == ("42", 1)
    assert trajectory.counters["model_calls"] == 2

    reduce = own_class(f"{EXAMPLES}/map_reduce.py:map_reduce")()
    client = scripted(lambda prompt, params: f"found {len(prompt)}")
    trajectory = await drive(reduce, task("x" * 4000 * 20), client)
    assert trajectory.counters["model_calls"] == 20 + 3 + 1
    assert "found" in trajectory.answer


def test_the_scripted_readers_of_the_bullets_write_what_the_agent_asks_for():
    from memjax.data.tiny import TinyTasks
    from memjax.own_code import load_own

    rng, tasks = random.Random(0), TinyTasks(min_chunks=8, max_chunks=8, seed=5)
    careful, hasty = (load_own(f"{EXAMPLES}/bullets_script.py:{name}", "script") for name in ("careful", "script"))
    right = dict.fromkeys(("careful", "hasty"), 0)
    for number in range(20):
        given = tasks.task(number)
        for name, script in (("careful", careful), ("hasty", hasty)):
            written = script(given, rng)
            assert len(written) == 9
            right[name] += written[-1] == f"\\boxed{{ {given.answers[0]} }}"
    assert right["careful"] == 20
    assert 0 < right["hasty"] < 15  # what there is to gain


def test_a_failure_says_whose_fault_it_was():
    from memjax.episodes.run import is_own_fault

    assert is_own_fault(ValueError("past the window"))
    assert is_own_fault(KeyError("x"))
    assert not is_own_fault(ClientError("the service is gone"))
    assert not is_own_fault(OSError("the disk is full"))
    assert not is_own_fault(TimeoutError())
    assert not is_own_fault(ExceptionGroup("two", [KeyError("x"), ClientError("y")]))
