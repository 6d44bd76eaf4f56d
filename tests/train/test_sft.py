"""Demonstrations are what an agent's model would have written, and the supervised loss is their cross-entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.agents.base import Budgets
from memjax.agents.memagent import MemAgent
from memjax.agents.prompt_files import load_memory_prompts
from memjax.data import tiny
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


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> MemAgent:
    directory = tmp_path_factory.mktemp("tiny")
    tiny.write_tokenizer(directory)
    return MemAgent(Tokenizer.load(directory), load_memory_prompts(path=PROMPTS), Budgets(4, 24, 10, 6))


def examples(agent: MemAgent, step: int = 0, seed: int = 0, **fields: object) -> list[Trajectory]:
    values = {"name": "stage", "kind": "demonstrations", "steps": 9, "examples": 6}
    stage = SupervisedStage.model_validate(values | fields)
    return stage_examples(stage, step, agent, agent.tokenizer, seed)


def sampled(trajectory: Trajectory, agent: MemAgent) -> list[str]:
    return [agent.tokenizer.decode(c.token_ids[c.loss_mask]).strip() for c in trajectory.conversations]


def test_a_demonstration_is_the_agent_s_own_conversations(agent: MemAgent) -> None:
    tasks = TinyTasks(min_chunks=3, max_chunks=3)
    for number, trajectory in enumerate(examples(agent, tasks=tasks)):
        task = tasks.task(number)
        assert [c.kind for c in trajectory.conversations] == ["memory", "memory", "memory", "final"]
        *memories, answer = sampled(trajectory, agent)
        assert answer == f"\\boxed{{ {task.answers[0]} }}"
        key = task.extra["chain"][0]
        assert set(memories) <= {"none", f"{key} {task.answers[0]} ."}
        for memory, after in zip(memories, trajectory.conversations[1:], strict=True):
            prompt = agent.tokenizer.decode(after.token_ids[~after.loss_mask])
            assert f"ask {task.question} memory {memory}" in prompt
        for conversation in trajectory.conversations:
            assert conversation.token_ids[-1] == agent.tokenizer.eos_ids[0]
            assert conversation.loss_mask[-1]


def test_examples_are_the_same_when_made_again_and_others_at_every_step(agent: MemAgent) -> None:
    def ids(**choice: int) -> list[bytes]:
        return [c.token_ids.tobytes() for t in examples(agent, **choice, kind="recall") for c in t.conversations]

    assert ids(step=3) == ids(step=3)
    assert not set(ids(step=3)) & set(ids(step=4))
    assert not set(ids(step=3)) & set(ids(step=3, seed=1))


def test_policies_have_their_shares(agent: MemAgent) -> None:
    tasks = TinyTasks(min_chunks=3, max_chunks=3)
    shares = {"oracle": 1, "newest": 3}
    made = examples(agent, examples=200, tasks=tasks, policies=shares)
    oracle = sum(len(set(sampled(t, agent)[:-1]) - {"none"}) <= 1 for t in made)
    assert 40 < oracle < 80  # a quarter of 200, and the blind that were shown a single fact


def test_the_supervised_loss_is_the_mean_cross_entropy_of_what_is_written(agent: MemAgent) -> None:
    options = ModelOptions()
    params = calm(init_params(CONFIG, options, jax.random.key(0)), CONFIG)
    made = examples(agent)
    conversations = [c for t in made for c in t.conversations]
    tokens_BT, mask_BT = (np.zeros((len(conversations), 64), np.int32) for _ in range(2))
    for row, conversation in enumerate(conversations):
        tokens_BT[row, : len(conversation.token_ids)] = conversation.token_ids
        mask_BT[row, : len(conversation.token_ids)] = conversation.loss_mask

    @jax.jit
    def cross_entropy(params: Params) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(64), tokens_BT.shape)
        hidden_BTD = forward(params, CONFIG, options, jnp.asarray(tokens_BT), positions_BT, jnp.ones_like(positions_BT))
        scores_BTV = jax.nn.log_softmax(logits(params, CONFIG, options, hidden_BTD)[..., : agent.tokenizer.size])
        chosen_BT = jnp.take_along_axis(scores_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(chosen_BT * mask_BT[:, 1:]) / mask_BT.sum()

    expected = float(cross_entropy(params))
    update = make_update(
        CONFIG, options, LogprobOptions(vocab_size=agent.tokenizer.size), OptimizerConfig(), supervised_loss
    )
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


def test_a_demonstration_that_does_not_fit_the_agent_is_refused(agent: MemAgent) -> None:
    short = MemAgent(agent.tokenizer, agent.prompts, Budgets(1, 24, 10, 6))
    with pytest.raises(ValueError, match=r"the demonstration of tiny-0-0 does not fit the agent: the question has 2"):
        examples(short)


def test_sampled_and_written_conversations_render_alike(agent: MemAgent) -> None:
    """The prompt of the second turn is the same whether the memory came as text or as ids."""
    reading = agent.start("value k01")
    text = agent.prompts.memory.fill({"question": reading.question, "memory": "k01 v02 .", "chunk": "w01 w02"})
    ids = agent.prompts.memory.fill(
        {
            "question": reading.question,
            "memory": agent.tokenizer.encode("k01 v02 ."),
            "chunk": agent.tokenizer.encode("w01 w02"),
        }
    )
    assert agent.tokenizer.render(text.messages) == agent.tokenizer.render(ids.messages)
