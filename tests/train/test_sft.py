"""Demonstrations are what an agent's model would have written, and the supervised loss is their cross-entropy."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.agents.config import AgentConfig
from memjax.agents.memagent import MemAgent
from memjax.agents.single import Single
from memjax.agents.tool import ToolAgent
from memjax.data import arithmetic, tiny
from memjax.data.arithmetic import ArithmeticTasks
from memjax.data.tiny import TinyTasks
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import Params, forward, init_params, logits
from memjax.tokenizer import Tokenizer
from memjax.train.config import SupervisedStage
from memjax.train.learner import calm
from memjax.train.logprobs import LogprobOptions
from memjax.train.optimizer import OptimizerConfig
from memjax.train.packing import PackingConfig
from memjax.train.sft import stage_examples, supervised_batch, supervised_loss
from memjax.train.step import init_state, make_update, place
from memjax.trajectory import Trajectory
from tests.train.tiny_run import PROMPTS

CONFIG = Qwen2Config.from_hf(tiny.model_config())
PACKING = PackingConfig(row_tokens=128, micro_batch_tokens=512)


AGENT = MemAgent(**tiny.BUDGETS, prompts=PROMPTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    tiny.write_tokenizer(directory)
    return Tokenizer.load(directory)


def examples(
    tokenizer: Tokenizer, step: int = 0, seed: int = 0, agent: AgentConfig = AGENT, **fields: object
) -> list[Trajectory]:
    values = {"name": "stage", "kind": "demonstrations", "steps": 9, "examples": 6}
    stage = SupervisedStage.model_validate(values | fields)
    return stage_examples(stage, step, agent, tokenizer, seed)


def sampled(trajectory: Trajectory, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(c.token_ids[c.loss_mask]).strip() for c in trajectory.conversations]


def test_a_demonstration_is_the_agent_s_own_conversations(tokenizer: Tokenizer) -> None:
    tasks = TinyTasks(min_chunks=3, max_chunks=3)
    for number, trajectory in enumerate(examples(tokenizer, tasks=tasks)):
        task = tasks.task(number)
        assert [c.kind for c in trajectory.conversations] == ["memory", "memory", "memory", "final"]
        *memories, answer = sampled(trajectory, tokenizer)
        assert answer == f"\\boxed{{ {task.answers[0]} }}"
        key = task.extra["chain"][0]
        assert set(memories) <= {"none", f"{key} {task.answers[0]} ."}
        for memory, after in zip(memories, trajectory.conversations[1:], strict=True):
            prompt = tokenizer.decode(after.token_ids[~after.loss_mask])
            assert f"ask {task.question} memory {memory}" in prompt
        for conversation in trajectory.conversations:
            assert conversation.token_ids[-1] == tokenizer.eos_ids[0]
            assert conversation.loss_mask[-1]


def test_examples_are_the_same_when_made_again_and_others_at_every_step(tokenizer: Tokenizer) -> None:
    def ids(**choice: int) -> list[bytes]:
        return [c.token_ids.tobytes() for t in examples(tokenizer, **choice, kind="recall") for c in t.conversations]

    assert ids(step=3) == ids(step=3)
    assert not set(ids(step=3)) & set(ids(step=4))
    assert not set(ids(step=3)) & set(ids(step=3, seed=1))


def test_policies_have_their_shares(tokenizer: Tokenizer) -> None:
    tasks = TinyTasks(min_chunks=3, max_chunks=3)
    shares = {"oracle": 1, "newest": 3}
    made = examples(tokenizer, examples=200, tasks=tasks, policies=shares)
    oracle = sum(len(set(sampled(t, tokenizer)[:-1]) - {"none"}) <= 1 for t in made)
    assert 40 < oracle < 80  # a quarter of 200, and the blind that were shown a single fact


def test_a_scripted_reader_of_one_s_own_is_learned_from_and_refused_in_a_sentence(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def says(task, rng): return ['none'] * 3\n"
        "def one(task, rng): return 'none'\n"
        "def fails(task, rng): return {}['missing']\n"
    )
    tasks = TinyTasks(min_chunks=2, max_chunks=2)
    made = examples(tokenizer, tasks=tasks, policies={f"{tmp_path}/own.py:says": 1.0})
    assert sampled(made[0], tokenizer) == ["none", "none", "none"]
    with pytest.raises(ValueError, match="must return its replies as a list of str, got 'none'"):
        examples(tokenizer, tasks=tasks, policies={f"{tmp_path}/own.py:one": 1.0})
    with pytest.raises(ValueError, match="failed at tiny-0-0: KeyError: 'missing'"):
        examples(tokenizer, tasks=tasks, policies={f"{tmp_path}/own.py:fails": 1.0})


def test_the_supervised_loss_is_the_mean_cross_entropy_of_what_is_written(tokenizer: Tokenizer) -> None:
    options = ModelOptions()
    params = calm(init_params(CONFIG, options, jax.random.key(0)), CONFIG)
    made = examples(tokenizer)
    conversations = [c for t in made for c in t.conversations]
    tokens_BT, mask_BT = (np.zeros((len(conversations), 64), np.int32) for _ in range(2))
    for row, conversation in enumerate(conversations):
        tokens_BT[row, : len(conversation.token_ids)] = conversation.token_ids
        mask_BT[row, : len(conversation.token_ids)] = conversation.loss_mask

    @jax.jit
    def cross_entropy(params: Params) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(64), tokens_BT.shape)
        hidden_BTD = forward(params, CONFIG, options, jnp.asarray(tokens_BT), positions_BT, jnp.ones_like(positions_BT))
        scores_BTV = jax.nn.log_softmax(logits(params, CONFIG, options, hidden_BTD)[..., : tokenizer.size])
        chosen_BT = jnp.take_along_axis(scores_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(chosen_BT * mask_BT[:, 1:]) / mask_BT.sum()

    expected = float(cross_entropy(params))
    update = make_update(CONFIG, options, LogprobOptions(vocab_size=tokenizer.size), OptimizerConfig(), supervised_loss)
    state = init_state(params, CONFIG, options, OptimizerConfig())
    _, metrics = update(state, place(supervised_batch(made, PACKING), None))
    assert float(metrics["training/tokens"]) == mask_BT.sum()
    assert float(metrics["actor/loss"]) == pytest.approx(expected, rel=1e-5)


def test_calm_weights_leave_the_embedding_almost_as_it_is() -> None:
    options = ModelOptions()
    params = calm(init_params(CONFIG, options, jax.random.key(0)), CONFIG)
    assert float(params["embed_tokens"]["weight"].std()) == pytest.approx(0.2, rel=0.05)
    for layer in params["layers"].values():
        for leaf in (layer["self_attn"]["o_proj"], layer["mlp"]["down_proj"]):
            assert float(leaf["weight"].std()) == pytest.approx(0.0125, rel=0.05)


def test_a_demonstration_that_does_not_fit_the_agent_is_refused(tokenizer: Tokenizer) -> None:
    for agent, problem in {
        AGENT.model_copy(update={"question": 1}): "the question has 2",
        AGENT.model_copy(update={"chunk": 48}): "it takes fewer than",
        Single(): "it takes fewer than",
    }.items():
        with pytest.raises(ValueError, match=rf"the demonstration of tiny-0-\d does not fit the agent: {problem}"):
            examples(tokenizer, agent=agent)
    with pytest.raises(ValueError, match="recall teaches an agent with a memory, not Single"):
        examples(tokenizer, agent=Single(), kind="recall")


def test_sampled_and_written_conversations_render_alike(tokenizer: Tokenizer) -> None:
    """The prompt of the second turn is the same whether the memory came as text or as ids."""
    slots = {"question": "value k01", "memory": "k01 v02 .", "chunk": "w01 w02"}
    ids = {name: text if name == "question" else tokenizer.encode(text) for name, text in slots.items()}
    template = AGENT.loaded_prompts.memory
    assert tokenizer.render(template.fill(slots).messages) == tokenizer.render(template.fill(ids).messages)


def test_a_stage_of_sums_is_shown_with_a_tool(tmp_path) -> None:
    arithmetic.write_tokenizer(tmp_path)
    tokenizer, agent = Tokenizer.load(tmp_path), ToolAgent(question=8, answer=16, system="")
    stage = {"arithmetic": {"seed": 1}, "policies": {"whole": 1.0}}
    found = examples(tokenizer, agent=agent, **stage)
    assert [len(trajectory.conversations) for trajectory in found] == [1] * 6
    assert all(trajectory.counters["tool_calls"] == 1 for trajectory in found)
    assert found[0].conversations[0].token_ids.tolist() == (
        examples(tokenizer, agent=agent, **stage)[0].conversations[0].token_ids.tolist()
    )
    with pytest.raises(ValueError, match=r"no scripted reader is called 'oracle'; there are whole, hasty"):
        SupervisedStage(name="s", kind="demonstrations", steps=1, arithmetic=ArithmeticTasks())
