"""A GGUF file is its Hugging Face twin: same config, same tokenizer, and weights as its quantisation rounds them."""

from __future__ import annotations

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from memjax.checkpoint import load_model, tensors
from memjax.checkpoint.gguf import GGUFModel
from memjax.gguf_file import read_gguf
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.rollout.client import Message
from memjax.tokenizer import Tokenizer
from tests.tiny_model import CHAT_TEMPLATE, TINY_SIZE, tiny_config, tiny_definition, tiny_weights, write_tiny_model

# Hugging Face's name inside a layer -> ggml's
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def ggml_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def quantise(array: np.ndarray, kind: Kind) -> np.ndarray:
    return gguf.quants.quantize(array, kind)


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    config: Qwen2Config,
    matrix_kind: Kind,
    *,
    architecture: str = "qwen2",
    part: tuple[int, int, int] | None = None,
    pre: str | None = "qwen2",
) -> dict[str, np.ndarray]:
    """Write the file; returns the weights as the quantisation rounds them.

    `part` are its number, the number of parts and that of all tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    if part:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
        writer.add_int32("split.tensors.count", part[2])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    _write_tokenizer(writer, config.vocab_size, pre)
    rounded = {}
    for name, array in weights.items():
        kind = matrix_kind if array.ndim > 1 else Kind.F32
        data = quantise(array, kind)
        rounded[name] = gguf.quants.dequantize(data, kind).reshape(array.shape)
        writer.add_tensor(ggml_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str | None) -> None:
    definition = tiny_definition()
    tokens = [*definition["model"]["vocab"], *(token["content"] for token in definition["added_tokens"])]
    kinds = [1] * len(definition["model"]["vocab"]) + [3 if t["special"] else 4 for t in definition["added_tokens"]]
    padding = vocab_size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(kinds + [5] * padding)
    writer.add_token_merges(definition["model"]["merges"])
    writer.add_eos_token_id(273)
    writer.add_pad_token_id(271)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_config(**changes: object) -> Qwen2Config:
    return tiny_config(**({"eos_token_id": 273} | changes))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_loads_equal_to_its_twin(tmp_path: Path, kind: Kind, tied: bool) -> None:
    config = gguf_config(tie_word_embeddings=tied)
    rounded = write_gguf(tmp_path / "tiny.gguf", tiny_weights(config), config, kind)
    directory = write_tiny_model(tmp_path / "twin", config)
    save_file(rounded, directory / "model.safetensors")
    ours, twin = load_model(tmp_path / "tiny.gguf"), load_model(directory)
    assert ours.config == twin.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, twin.params)
    chat = [Message("user", ("the whale <|im_end|>", (65, 66)))]
    assert ours.tokenizer.render(chat) == twin.tokenizer.render(chat)
    assert ours.tokenizer.size == twin.tokenizer.size == TINY_SIZE
    assert (ours.tokenizer.eos_ids, ours.tokenizer.pad_id) == (twin.tokenizer.eos_ids, twin.tokenizer.pad_id)


def write_split(directory: Path, count: int) -> dict[str, np.ndarray]:
    """A model in so many parts, the tensors dealt out in turn; returns its weights."""
    config = gguf_config()
    weights, rounded = tiny_weights(config), {}
    for number in range(count):
        some = dict(list(weights.items())[number::count])
        path = directory / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        rounded |= write_gguf(path, some, config, Kind.Q8_0, part=(number, count, len(weights)))
    return rounded


@pytest.mark.parametrize("count", [2, 5])
def test_a_split_model_opens_from_its_first_part(tmp_path: Path, count: int) -> None:
    rounded = write_split(tmp_path, count)
    directory = write_tiny_model(tmp_path / "twin", gguf_config())
    save_file(rounded, directory / "model.safetensors")
    ours, twin = load_model(tmp_path / f"tiny-00001-of-{count:05}.gguf"), load_model(directory)
    jax.tree.map(np.testing.assert_array_equal, ours.params, twin.params)
    with pytest.raises(ValueError, match=f"is part 2 of {count}: give part 1, .*tiny-00001-of-{count:05}.gguf"):
        load_model(tmp_path / f"tiny-00002-of-{count:05}.gguf")
    (tmp_path / f"tiny-{count:05}-of-{count:05}.gguf").unlink()
    with pytest.raises(ValueError, match=f"tiny-{count:05}-of-{count:05}.gguf is not beside it"):
        load_model(tmp_path / f"tiny-00001-of-{count:05}.gguf")


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_tokenizer_without_the_name_of_its_split_is_read_as_qwen2_and_it_is_told(tmp_path, caplog, pre) -> None:
    config = gguf_config()
    write_gguf(tmp_path / "old.gguf", tiny_weights(config), config, Kind.F32, pre=pre)
    write_gguf(tmp_path / "new.gguf", tiny_weights(config), config, Kind.F32)
    text = "The whale, 42 of them: ça va?"
    old = load_model(tmp_path / "old.gguf").tokenizer.encode(text)
    assert "tokenizer.ggml.pre" in caplog.text
    assert old == load_model(tmp_path / "new.gguf").tokenizer.encode(text)


def test_rows_read_alone_equal_those_of_the_whole(tmp_path: Path) -> None:
    config = gguf_config()
    rounded = write_gguf(tmp_path / "tiny.gguf", tiny_weights(config), config, Kind.Q8_0)
    model = GGUFModel(tmp_path / "tiny.gguf")
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(model.read(name, (slice(5, 9), slice(2, 40))), rounded[name][5:9, 2:40])


def test_layers_are_stacked_from_a_gguf_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ELEMENTS", 640)  # ten rows at a time
    config = gguf_config()
    rounded = write_gguf(tmp_path / "tiny.gguf", tiny_weights(config), config, Kind.Q8_0)
    params = load_model(tmp_path / "tiny.gguf", ModelOptions(scan_layers=True)).params
    name = "mlp.gate_proj.weight"
    expected = np.stack([rounded[f"model.layers.{i}.{name}"] for i in range(config.num_hidden_layers)])
    np.testing.assert_array_equal(params["layers"]["mlp"]["gate_proj"]["weight"], expected)


def test_one_matrix_stored_twice_is_tied_and_the_heads_copy_is_used(tmp_path: Path) -> None:
    config = gguf_config(tie_word_embeddings=True)
    weights = tiny_weights(config)
    coarse = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    noise = np.random.default_rng(1).standard_normal(coarse["lm_head.weight"].shape).astype(np.float32)
    coarse["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] + 0.01 * noise
    rounded = write_gguf(tmp_path / "tiny.gguf", coarse, config, Kind.F32)
    model = load_model(tmp_path / "tiny.gguf")
    assert model.config.tie_word_embeddings
    assert "lm_head" not in model.params
    np.testing.assert_array_equal(model.params["embed_tokens"]["weight"], rounded["lm_head.weight"])


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    config = gguf_config()
    write_gguf(tmp_path / "tiny.gguf", tiny_weights(config), config, Kind.F32)
    return tmp_path / "tiny.gguf"


def test_the_header_equals_what_the_gguf_package_reads(tiny_gguf: Path) -> None:
    ours, theirs = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    expected = {t.name: (tuple(reversed(t.shape.tolist())), int(t.tensor_type), t.data_offset) for t in theirs.tensors}
    assert {t.name: (t.shape, t.ggml_type, t.offset) for t in ours.tensors.values()} == expected


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_named(tiny_gguf: Path, part: float) -> None:
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=r"tiny\.gguf .*(download it again|not a GGUF file)$") as caught:
        GGUFModel(tiny_gguf)
    assert "unpack" not in str(caught.value)


@pytest.mark.parametrize("garbage", [b"\xff" * 16, b"\x00" * 16, b"\x10\x27\x00\x00\x00\x00\x00\x00" * 2])
def test_a_damaged_header_is_named(tiny_gguf: Path, garbage: bytes) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[60 : 60 + len(garbage)] = garbage
    tiny_gguf.write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny\.gguf"):
        GGUFModel(tiny_gguf)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="is not a GGUF file: it starts with"):
        load_model(tmp_path / "model.safetensors")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    config = gguf_config()
    write_gguf(tmp_path / "other.gguf", tiny_weights(config), config, Kind.F32, architecture="llama")
    with pytest.raises(ValueError, match="architecture 'llama'; memjax runs 'qwen2' only"):
        load_model(tmp_path / "other.gguf")


def test_absent_tensors_and_strange_ones_are_named(tmp_path: Path) -> None:
    config = gguf_config()
    weights = tiny_weights(config)
    del weights["model.layers.1.self_attn.q_proj.bias"]
    write_gguf(tmp_path / "tiny.gguf", weights, config, Kind.F32)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.q_proj\.bias"):
        load_model(tmp_path / "tiny.gguf")
    del weights["model.embed_tokens.weight"]
    write_gguf(tmp_path / "tiny.gguf", weights, config, Kind.F32)
    with pytest.raises(ValueError, match=r"has no token_embd\.weight"):
        load_model(tmp_path / "tiny.gguf")


def test_the_tokenizer_of_a_gguf_is_written_for_others_to_read(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ours = Tokenizer.load(tiny_gguf)
    ours.save(tmp_path / "out")
    twin = Tokenizer.load(tmp_path / "out")
    chat = [Message("user", ("the whale",))]
    assert twin.render(chat) == ours.render(chat)
    assert (twin.size, twin.eos_ids, twin.pad_id) == (ours.size, ours.eos_ids, ours.pad_id)
