import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.train.logprobs import LogprobOptions, token_logprobs

B, T, D, V, KNOWN = 3, 13, 8, 24, 20
TEMPERATURE = 0.7
score = jax.jit(token_logprobs, static_argnums=4)


def inputs(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, projection, tokens and a mask with a row in which nothing was sampled."""
    rng = np.random.default_rng(seed)
    mask_BT = rng.random((B, T)) < 0.4
    mask_BT[:, 0], mask_BT[1] = False, False
    hidden_BTD, head_VD = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
    tokens_BT = rng.integers(0, KNOWN, (B, T))
    return jnp.float32(hidden_BTD), jnp.float32(head_VD), jnp.int32(tokens_BT), jnp.asarray(mask_BT)


def all_at_once(hidden_BTD, head_VD, tokens_BT, mask_BT):
    """The same from whole logits over the known ids."""
    logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD[:, :-1], head_VD[:KNOWN]) / TEMPERATURE
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    chosen_BT = jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], axis=-1)[:, :, 0]
    entropy_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1)
    return tuple(jnp.pad(jnp.where(mask_BT[:, 1:], x_BT, 0), ((0, 0), (1, 0))) for x_BT in (chosen_BT, entropy_BT))


def value_and_gradients(function):
    """Both outputs, and the gradients of a fixed mixture of them in hidden states and projection."""
    _, head_VD, tokens_BT, mask_BT = inputs()
    mixture = np.random.default_rng(9).normal(size=(2, B, T)).astype(np.float32)

    def mixed(hidden_BTD, head_VD):
        found = function(hidden_BTD, head_VD, tokens_BT, mask_BT)
        return sum(jnp.sum(m * x) for m, x in zip(mixture, found, strict=True)), found

    (_, found), grads = jax.jit(jax.value_and_grad(mixed, argnums=(0, 1), has_aux=True))(inputs()[0], head_VD)
    return *found, *grads


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_give_the_values_and_gradients_of_the_whole(chunk):
    options = LogprobOptions(KNOWN, TEMPERATURE, chunk)
    found = value_and_gradients(lambda *xs: token_logprobs(*xs, options))
    for mine, expected in zip(found, value_and_gradients(all_at_once), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_ids_that_the_tokenizer_does_not_know_have_no_gradient():
    *_, head_grad_VD = value_and_gradients(lambda *xs: token_logprobs(*xs, LogprobOptions(KNOWN, TEMPERATURE, 4)))
    assert not head_grad_VD[KNOWN:].any()
    assert np.abs(head_grad_VD[:KNOWN]).min(axis=1).max() > 0


def test_a_batch_without_sampled_tokens_gives_zeros():
    hidden_BTD, head_VD, tokens_BT, mask_BT = inputs()
    options = LogprobOptions(KNOWN, TEMPERATURE, 4)
    found = score(hidden_BTD, head_VD, tokens_BT, jnp.zeros_like(mask_BT), options)
    assert not any(x_BT.any() for x_BT in found)


def test_bfloat16_hidden_states_give_float32_logprobs():
    hidden_BTD, head_VD, tokens_BT, mask_BT = inputs()
    options = LogprobOptions(KNOWN, TEMPERATURE, 4)
    found = score(hidden_BTD.astype(jnp.bfloat16), head_VD, tokens_BT, mask_BT, options)
    assert {x_BT.dtype for x_BT in found} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(found[0], jax.jit(all_at_once)(*inputs())[0], atol=0.1)


def test_memory_holds_one_chunk_of_logits_forward_and_backward():
    b, t, d, v = 2, 1024, 8, 32_000
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((b, t, d), "float32"), ((v, d), "float32"), ((b, t), "int32"), ((b, t), "bool")]
    ]
    options = LogprobOptions(v, chunk=32)

    def loss(*arrays):
        logprobs_BT, entropy_BT = token_logprobs(*arrays, options)
        return (logprobs_BT + entropy_BT).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    all_logits, one_chunk = b * t * v * 4, b * 32 * v * 4
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 6 * one_chunk < all_logits / 5


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"chunk": 0}, {"vocab_size": 0}])
def test_impossible_options_are_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        LogprobOptions(**({"vocab_size": KNOWN} | fields))
