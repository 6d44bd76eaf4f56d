"""Equivalences of the model with itself: layouts, caches, packing, meshes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import small

from memjax.mesh import make_mesh
from memjax.models import kv_cache, qwen2
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.rope import RopeConfig
from memjax.sharding import ROLLOUT, TRAIN, Layout

OPTIONS = ModelOptions()
SCANNED = ModelOptions(scan_layers=True)
B, T = 2, 12

forward = jax.jit(qwen2.forward, static_argnums=(1, 2))
forward_cached = jax.jit(qwen2.forward_cached, static_argnums=(1, 2, 6), donate_argnums=5)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(3).integers(0, 96, size=(B, T)), jnp.int32)


def run(params, config, options, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(params, config, options, tokens, positions, jnp.ones_like(tokens))


def close(got, expected, atol=1e-5):
    np.testing.assert_allclose(got, expected, atol=atol, rtol=1e-5)


def placed(params, config, options):
    """Parameters as these options want them."""
    params = qwen2.stack_layers(params) if options.scan_layers else params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, qwen2.abstract_params(config, options))
    return jax.device_put(params, shardings)


def value_and_gradients(params, config, options, tokens):
    @jax.jit
    def run_(params):
        def loss(params):
            hidden = run(params, config, options, tokens)
            return jnp.mean(jax.nn.log_softmax(qwen2.logits(params, config, options, hidden))[..., 0])

        return jax.value_and_grad(loss)(params)

    return run_(placed(params, config, options))


def test_values_and_gradients_do_not_depend_on_how_the_layers_run(tokens):
    config, params = small(num_hidden_layers=2)
    expected_value, expected = value_and_gradients(params, config, ModelOptions(attention="einsum"), tokens)
    for options in (OPTIONS, ModelOptions(remat=True), ModelOptions(scan_layers=True, remat=True)):
        value, gradients = value_and_gradients(params, config, options, tokens)
        close(value, expected_value)
        jax.tree.map(close, qwen2.unstack_layers(gradients) if options.scan_layers else gradients, expected)


@pytest.mark.parametrize(("sizes", "scan"), [((1, 8, 1), False), ((2, 2, 2), True), ((1, 1, 8), False)])
def test_a_mesh_changes_nothing(model, tokens, sizes, scan):
    config, params = model
    tokens = jnp.tile(tokens, (4, 1))
    options = ModelOptions(scan_layers=scan, layout=Layout(make_mesh(*sizes), TRAIN))
    expected = run(params, config, OPTIONS, tokens)
    sharded = placed(params, config, options)
    close(run(sharded, config, options, tokens), expected)

    options = replace(options, layout=replace(options.layout, rules=ROLLOUT))
    cache = kv_cache.init_cache(config, options, 8, 16)
    start = jnp.zeros(8, jnp.int32)
    hidden, cache = forward_cached(placed(params, config, options), config, options, tokens, start, cache, 16)
    close(hidden, expected)


@pytest.mark.parametrize(("scan", "attention"), [(False, "blockwise"), (True, "blockwise"), (True, "einsum")])
def test_prefill_in_pieces_and_decoding_equal_one_forward(model, tokens, scan, attention):
    config, params = model
    options = ModelOptions(scan_layers=scan, attention=attention)
    params_ = placed(params, config, options)
    expected = run(params, config, OPTIONS, tokens)
    cache, pieces = kv_cache.init_cache(config, options, B, 32), []
    for start, size, window in [(0, 5, 8), (5, 4, 16), (9, 1, 16), (10, 1, 16), (11, 1, 32)]:
        piece = tokens[:, start : start + size]
        starts = jnp.full(B, start, jnp.int32)
        hidden, cache = forward_cached(params_, config, options, piece, starts, cache, window)
        pieces.append(hidden)
    close(jnp.concatenate(pieces, axis=1), expected)


@pytest.mark.parametrize("attention", ["einsum", "blockwise"])
def test_rows_of_a_cache_may_be_at_different_places(model, tokens, attention):
    config, params = model
    options = ModelOptions(attention=attention)
    expected = run(params, config, OPTIONS, tokens)
    cache = kv_cache.init_cache(config, options, B, 32)
    _, cache = forward_cached(params, config, options, tokens, jnp.zeros(B, jnp.int32), cache, 16)
    ahead = jnp.asarray([4, 9], jnp.int32)  # what lies behind a row's place is stale and must not be seen
    token = jnp.take_along_axis(tokens, ahead[:, None], axis=1)
    hidden, _ = forward_cached(params, config, options, token, ahead, cache, 16)
    close(hidden[:, 0], expected[jnp.arange(B), ahead])


def test_packed_segments_equal_separate_sequences(model, tokens):
    config, params = model
    row = jnp.concatenate([tokens[:1, :7], tokens[1:, :5], jnp.zeros((1, 2), jnp.int32)], axis=1)
    positions = jnp.asarray([[*range(7), *range(5), 0, 1]], jnp.int32)
    segments = jnp.asarray([[1] * 7 + [2] * 5 + [0] * 2], jnp.int32)
    packed = forward(params, config, OPTIONS, row, positions, segments)
    expected = run(params, config, OPTIONS, tokens)
    close(packed[0, :7], expected[0, :7])
    close(packed[0, 7:12], expected[1, :5])


def test_a_token_changes_nothing_before_it(model, tokens):
    config, params = model
    changed = tokens.at[:, 6].set((tokens[:, 6] + 1) % 96)
    before, after = (run(params, config, OPTIONS, t) for t in (tokens, changed))
    close(after[:, :6], before[:, :6], atol=1e-6)
    assert jnp.min(jnp.max(jnp.abs(after[:, 6:] - before[:, 6:]), axis=-1)) > 1e-3


def test_padding_after_a_prompt_does_not_matter(model, tokens):
    config, params = model
    expected = run(params, config, OPTIONS, tokens)
    padded = jnp.pad(tokens, ((0, 0), (0, 4)), constant_values=5)
    cache = kv_cache.init_cache(config, OPTIONS, B, 16)
    hidden, _ = forward_cached(params, config, OPTIONS, padded, jnp.zeros(B, jnp.int32), cache, 16)
    close(hidden[:, :T], expected)


def test_the_cache_keeps_what_it_held_outside_the_written_part(model, tokens):
    config, params = model
    for options in (OPTIONS, SCANNED):
        cache = jax.tree.map(lambda x: x + 7, kv_cache.init_cache(config, options, B, 32))
        start = jnp.asarray([3, 16], jnp.int32)
        _, cache = forward_cached(placed(params, config, options), config, options, tokens, start, cache, 32)
        for leaf in jax.tree.leaves(cache):
            rows_BLKSH = np.moveaxis(np.asarray(leaf), -4, 0)
            for row, at in zip(rows_BLKSH, (3, 16), strict=True):
                outside = np.delete(row, np.arange(at, at + T), axis=-2)
                np.testing.assert_array_equal(outside, 7)


def test_stacking_the_layers_and_back_is_the_identity_and_keeps_shardings(model):
    config, params = model
    options = ModelOptions(layout=Layout(make_mesh(1, 2, 4), TRAIN))
    params = placed(params, config, options)
    stacked = qwen2.stack_layers(params)
    wanted = qwen2.abstract_params(config, replace(options, scan_layers=True))
    assert jax.tree.structure(stacked) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(stacked), jax.tree.leaves(wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    back = qwen2.unstack_layers(stacked)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_weights_are_split_by_heads_and_features_and_whole_where_heads_are_too_few():
    config, _ = small()  # 8 query heads, 2 kv heads
    options = ModelOptions(scan_layers=True, layout=Layout(make_mesh(1, 2, 4), TRAIN))
    layer = qwen2.abstract_params(config, options)["layers"]
    specs = jax.tree.map(lambda leaf: tuple(leaf.sharding.spec), layer)
    assert specs["self_attn"]["q_proj"] == {"weight": (None, "tensor", "fsdp"), "bias": (None, "tensor")}
    assert specs["self_attn"]["k_proj"] == {"weight": (None, None, "fsdp"), "bias": (None, None)}
    assert specs["self_attn"]["o_proj"] == {"weight": (None, "fsdp", "tensor")}
    assert specs["mlp"]["down_proj"] == {"weight": (None, "fsdp", "tensor")}


@pytest.mark.parametrize("scan", [False, True])
def test_random_parameters_are_born_sharded_and_spread_as_configured(scan):
    config, _ = small()
    options = ModelOptions(scan_layers=scan, layout=Layout(make_mesh(1, 2, 4), TRAIN))
    params = qwen2.init_params(config, options, jax.random.key(0))
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(qwen2.abstract_params(config, options)), strict=True):
        assert got.shape == want.shape
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    layers = params if scan else qwen2.stack_layers(params)
    up = np.asarray(layers["layers"]["mlp"]["up_proj"]["weight"])
    assert np.std(up) == pytest.approx(config.initializer_range, rel=0.05)
    assert not np.allclose(up[0], up[1])


def test_bfloat16_stays_near_float32(model, tokens):
    config, params = model
    expected = run(params, config, OPTIONS, tokens)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    for compute in (jnp.float32, jnp.bfloat16):
        got = run(half, config, ModelOptions(param_dtype=jnp.bfloat16, compute_dtype=compute), tokens)
        assert got.dtype == compute
        assert np.mean(np.abs(np.asarray(got, np.float32) - expected)) < 0.05 * np.mean(np.abs(expected))


def test_a_matrix_product_of_few_rows_pads_no_result():
    from memjax.models.layers import matmul

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, 3, 16), (5, 16)))
    got = matmul(x, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float32) @ np.asarray(w, np.float32).T, rtol=1e-5, atol=1e-5)


QWEN25 = {  # name: hidden, ffn, layers, heads, kv heads, tied, vocabulary, parameters in all (of the published tensors)
    "0.5B": (896, 4864, 24, 14, 2, True, 151_936, 494_032_768),
    "1.5B": (1536, 8960, 28, 12, 2, True, 151_936, 1_543_714_304),
    "3B": (2048, 11_008, 36, 16, 2, True, 151_936, 3_085_938_688),
    "7B": (3584, 18_944, 28, 28, 4, False, 152_064, 7_615_616_512),
    "14B": (5120, 13_824, 48, 40, 8, False, 152_064, 14_770_033_664),
    "32B": (5120, 27_648, 64, 40, 8, False, 152_064, 32_763_876_352),
    "72B": (8192, 29_568, 80, 64, 8, False, 152_064, 72_706_203_648),
}


@pytest.mark.parametrize("size", QWEN25)
def test_the_published_sizes_have_their_parameters_and_trace(size):
    d, f, layers, heads, kv_heads, tied, vocab, count = QWEN25[size]
    rope = RopeConfig(1e6)
    config = Qwen2Config(vocab, d, f, layers, heads, kv_heads, d // heads, rope=rope, tie_word_embeddings=tied)
    options = ModelOptions(jnp.bfloat16, jnp.bfloat16, scan_layers=True, layout=Layout(make_mesh(1, 2, 4), TRAIN))
    params = qwen2.abstract_params(config, options)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count

    def step(params, tokens, cache):
        hidden, cache = qwen2.forward_cached(params, config, options, tokens, jnp.zeros(4, jnp.int32), cache, 64)
        return qwen2.logits(params, config, options, hidden[:, -1]), cache

    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    cache = kv_cache.abstract_cache(config, options, 4, 128)
    out, cache_out = jax.eval_shape(step, params, tokens, cache)
    assert (out.shape, out.dtype) == ((4, vocab), jnp.float32)
    assert jax.tree.map(lambda leaf: leaf.shape, cache_out) == jax.tree.map(lambda leaf: leaf.shape, cache)
