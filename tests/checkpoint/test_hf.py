"""Hugging Face directories: what is loaded is what is there, what is written is what was held, and faults are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from memjax.checkpoint import hf, tensors
from memjax.checkpoint.hf import SafetensorsDirectory, load_params, read_config, save
from memjax.mesh import make_mesh
from memjax.models.config import ModelOptions, Qwen2Config
from memjax.models.qwen2 import abstract_params, forward, logits, stack_layers
from memjax.models.rope import RopeConfig
from memjax.sharding import TRAIN, Layout
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_json, write_json
from tests.tiny_model import tiny_config, tiny_weights, write_tiny_model

YARN = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=1024)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def options(dtype: str = "float32", *, scan: bool = False, sharded: bool = False) -> ModelOptions:
    layout = Layout(make_mesh(1, 2, 4), TRAIN) if sharded else None
    return ModelOptions(param_dtype=jnp.dtype(dtype), scan_layers=scan, layout=layout)


def file_bits(directory: Path) -> dict[str, bytes]:
    """Every tensor's bytes, read by safetensors itself."""
    bits = {}
    for file in sorted(directory.glob("*.safetensors")):
        header_length = int.from_bytes(file.read_bytes()[:8], "little")
        header = json.loads(file.read_bytes()[8 : 8 + header_length])
        for name, spec in header.items():
            if name != "__metadata__":
                start, stop = spec["data_offsets"]
                bits[name] = file.read_bytes()[8 + header_length :][start:stop]
    return bits


@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "mesh"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(
    ("dtype", "tied"), [("float32", True), ("bfloat16", False)], ids=["tied", "untied in bfloat16"]
)
def test_loading_and_exporting_keeps_every_bit(
    tmp_path: Path, dtype: str, tied: bool, scan: bool, sharded: bool
) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    directory = write_tiny_model(tmp_path / "in", config, dtype=DTYPES[dtype])
    assert read_config(directory) == config
    params = load_params(directory, config, options(dtype, scan=scan, sharded=sharded))
    save(tmp_path / "out", params, config, Tokenizer.load(directory))
    assert file_bits(tmp_path / "out") == file_bits(directory)
    assert read_config(tmp_path / "out") == config


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_parameters_are_placed_where_the_layout_says(tmp_path: Path, scan: bool) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path, config)
    on_mesh = options(scan=scan, sharded=True)
    params = load_params(directory, config, on_mesh)
    plain = load_params(directory, config, options())
    expected = stack_layers(plain) if scan else plain
    jax.tree.map(lambda leaf, other: np.testing.assert_array_equal(leaf, other), params, expected)
    abstract = abstract_params(config, on_mesh)
    jax.tree.map(lambda leaf, want: _same_placement(leaf, want), params, abstract)


def _same_placement(leaf: jax.Array, want: jax.ShapeDtypeStruct) -> None:
    assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_parameters_are_cast_to_the_dtype_asked_for(tmp_path: Path, kept: str, wanted: str) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path, config, dtype=jnp.dtype(kept))
    params = load_params(directory, config, options(wanted))
    source = tiny_weights(config)["model.layers.1.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(
        params["layers"]["1"]["self_attn"]["k_proj"]["bias"], source.astype(jnp.dtype(kept)).astype(jnp.dtype(wanted))
    )


def test_an_export_in_shards_is_indexed_and_loads_the_same(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path / "in", config)
    source, tokenizer = SafetensorsDirectory(directory), Tokenizer.load(directory)
    hf.export(tmp_path / "out", source, config, tokenizer, dtype=jnp.float32, shard_bytes=100_000)
    index = read_json(tmp_path / "out" / "model.safetensors.index.json") or {}
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tiny_weights(config).values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="np") as tensors_of_file:
            np.testing.assert_array_equal(tensors_of_file.get_tensor(name), tiny_weights(config)[name])
    assert file_bits(tmp_path / "out") == file_bits(directory)
    SafetensorsDirectory(tmp_path / "out")


def test_an_export_has_what_readers_look_for(tmp_path: Path) -> None:
    config = tiny_config(rope=YARN)
    directory = write_tiny_model(tmp_path / "in", config)
    save(tmp_path / "out", load_params(directory, config, options()), config, Tokenizer.load(directory))
    written = read_json(tmp_path / "out" / "config.json") or {}
    assert written["rope_theta"] == 1e6
    assert "rope_parameters" not in written  # a second place for the same setting
    assert written["rope_scaling"]["factor"] == 4.0
    assert written["dtype"] == written["torch_dtype"] == "float32"
    generation = read_json(tmp_path / "out" / "generation_config.json") or {}
    assert generation == {"eos_token_id": [273, 271], "pad_token_id": 271}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_a_generation_config_is_kept(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "in")
    own = {"eos_token_id": [273], "temperature": 0.7}
    write_json(directory / "generation_config.json", own)
    config = tiny_config()
    save(tmp_path / "out", load_params(directory, config, options()), config, Tokenizer.load(directory))
    assert read_json(tmp_path / "out" / "generation_config.json") == own


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path, config)
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"], weights["model.layers.1.self_attn.q_proj.bias"]
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 96), np.float32)
    weights["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit its config") as caught:
        load_params(directory, config, options())
    message = str(caught.value)
    assert "missing: model.layers.1.self_attn.q_proj.bias, model.norm.weight;" in message
    assert "not of this model: model.layers.2.mlp.up_proj.weight;" in message
    assert "model.layers.0.mlp.up_proj.weight is [64, 96] instead of [96, 64]" in message


def test_many_wrong_tensors_are_counted(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="and 4 more"):
        load_params(directory, tiny_config(num_hidden_layers=3), options())


def test_tensors_that_follow_from_the_config_are_ignored(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    directory = write_tiny_model(tmp_path, config)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, directory / "model.safetensors")
    assert "lm_head" not in load_params(directory, config, options())


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, directory / "b.safetensors")
    with pytest.raises(ValueError, match=r"more than one file .* holds model\.norm\.weight"):
        SafetensorsDirectory(directory)


@pytest.mark.parametrize("length", [0, 5, 8, 100, 5000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, length: int) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated.*download it again"):
        SafetensorsDirectory(tmp_path)


def _header_of(**spec: object) -> bytes:
    header = json.dumps({"model.norm.weight": spec}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "truncated or no safetensors file"),
        ((8).to_bytes(8, "little") + b"{'a': 1}", "header of .* cannot be read"),
        ((2).to_bytes(8, "little") + b"[]", "header of .* cannot be read"),
        (_header_of(dtype="I32", shape=[16], data_offsets=[0, 64]), "dtype I32; memjax reads .*, not quantised"),
        (_header_of(dtype="F32", shape=[15], data_offsets=[0, 64]), "is not 64 bytes"),
        (_header_of(dtype="F32", shape=[16]), "header of .* cannot be read"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        SafetensorsDirectory(tmp_path)


def test_absent_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no safetensors files in .*; download them"):
        SafetensorsDirectory(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"convert its \.bin files"):
        SafetensorsDirectory(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00001.safetensors"}})
    with pytest.raises(ValueError, match=r"names files that are not there: model-00001"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"config\.json: model_type is 'llama'"),
        ({"hidden_size": None}, r"config\.json: config\.json lacks hidden_size"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    write_json(tmp_path / "config.json", tiny_config().to_hf() | change)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it a model directory"):
        read_config(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ValueError, match=r"to use tiny\.gguf, give the path of that file"):
        read_config(tmp_path)


class _Failing(SafetensorsDirectory):
    """Fails in the middle, as a full disk or a Ctrl-C would."""

    def read(self, name: str, index: tensors.Index) -> np.ndarray:
        if name.startswith("model.layers.1"):
            raise KeyboardInterrupt
        return super().read(name, index)


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path / "in", config)
    tokenizer, out = Tokenizer.load(directory), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        hf.export(out, _Failing(directory), config, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    hf.export(out, SafetensorsDirectory(directory), config, tokenizer)
    before = file_bits(out)
    with pytest.raises(KeyboardInterrupt):
        hf.export(out, _Failing(directory), config, tokenizer, dtype=jnp.float32)
    assert file_bits(out) == before


def test_only_an_export_or_nothing_is_replaced(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path / "in", config)
    source, tokenizer = SafetensorsDirectory(directory), Tokenizer.load(directory)
    (tmp_path / "empty").mkdir()
    hf.export(tmp_path / "empty", source, config, tokenizer)
    hf.export(tmp_path / "empty", source, config, tokenizer, dtype=jnp.float32)
    assert file_bits(tmp_path / "empty") == file_bits(directory)
    (tmp_path / "file").touch()
    for occupied in (directory, tmp_path / "file"):
        with pytest.raises(ValueError, match="give an empty or absent directory"):
            hf.export(occupied, source, config, tokenizer)
    with pytest.raises(ValueError, match="not as int8"):
        hf.export(tmp_path / "out", source, config, tokenizer, dtype=jnp.int8)


def test_an_export_reports_its_progress(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_tiny_model(tmp_path / "in", config)
    seen: list[tuple[int, int, str]] = []
    hf.export(
        tmp_path / "out",
        SafetensorsDirectory(directory),
        config,
        Tokenizer.load(directory),
        progress=lambda done, count, name: seen.append((done, count, name)),
    )
    assert [done for done, _, _ in seen] == list(range(seen[0][1] + 1))
    assert seen[0][2] == "model.embed_tokens.weight"
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_loading_holds_no_second_copy_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ELEMENTS", 1 << 14)
    config = tiny_config(vocab_size=4096, hidden_size=128, intermediate_size=1024, head_dim=32)
    directory = write_tiny_model(tmp_path, config, dtype=ml_dtypes.bfloat16)
    bytes_placed = 4 * sum(array.size for array in tiny_weights(config).values())
    load_params(directory, config, options(scan=scan))  # traces the model
    tracemalloc.start()
    params = load_params(directory, config, options(scan=scan))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == bytes_placed
    assert peak < 1.2 * bytes_placed
    source = tiny_weights(config)["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)  # 32 blocks of rows
    np.testing.assert_array_equal(params["embed_tokens"]["weight"], source.astype(np.float32))


_TORCH_SIDE = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory = sys.argv[1]
AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
tokens = torch.tensor(np.load(directory + "/tokens.npy"))
with torch.no_grad():
    np.save(directory + "/logits.npy", model(tokens.long()).logits.numpy())
"""


def _torch_python() -> str | None:
    python = os.environ.get("MEMJAX_TORCH_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import torch"], check=False, capture_output=True)
    return python if found.returncode == 0 else None


@pytest.mark.torch
@pytest.mark.parametrize(("tied", "yarn"), [(True, False), (False, True)], ids=["tied", "untied with YaRN"])
def test_transformers_loads_an_export_and_gives_the_same_logits(tmp_path: Path, tied: bool, yarn: bool) -> None:
    python = _torch_python()
    if python is None:
        pytest.skip("needs torch: install it, or set MEMJAX_TORCH_PYTHON to a python that has it and transformers")
    config = tiny_config(tie_word_embeddings=tied, rope=YARN if yarn else RopeConfig())
    directory = write_tiny_model(tmp_path / "in", config)
    params = load_params(directory, config, options())
    save(tmp_path / "out", params, config, Tokenizer.load(directory))
    tokens_BT = np.random.default_rng(0).integers(0, 276, (2, 40)).astype(np.int32)
    np.save(tmp_path / "out" / "tokens.npy", tokens_BT)
    subprocess.run([python, "-c", _TORCH_SIDE, str(tmp_path / "out")], check=True, capture_output=True)
    ours_BTV = _logits(params, config, tokens_BT)
    np.testing.assert_allclose(ours_BTV, np.load(tmp_path / "out" / "logits.npy"), atol=1e-4)


def _logits(params: dict, config: Qwen2Config, tokens_BT: np.ndarray) -> np.ndarray:
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    arrays = [jnp.asarray(array) for array in (tokens_BT, positions_BT, np.ones_like(tokens_BT))]
    hidden_BTD = forward(params, config, options(), *arrays)
    return np.asarray(logits(params, config, options(), hidden_BTD))
