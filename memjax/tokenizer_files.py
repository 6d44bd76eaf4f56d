"""Where a tokenizer comes from (a model directory, a GGUF file, the hub) and the files that it is written to."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memjax.gguf_file import read_gguf

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

# tokenizer.ggml.pre names the pre-tokeniser; both of these are Qwen2's split, one digit at a time.
_QWEN2_PRE = ("qwen2", "deepseek-r1-qwen")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GGML_CONTROL, _GGML_USER_DEFINED, _GGML_UNUSED = 3, 4, 5


def read_tokenizer_files(name: str | Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """The content of tokenizer.json and of tokenizer_config.json, and the path that they came from.

    `name` is a model directory, a .gguf file or a hub id. The settings hold the chat template wherever the files keep
    it, and `eos_token_id` from the model's configs. Raises ValueError that says what to do.
    """
    path = Path(name)
    if path.is_file():
        return *gguf_tokenizer(path), path
    if not path.is_dir():
        path = fetch(str(name), ["*.json", "*.txt", "*.jinja"])
    return *_directory_tokenizer(path), path


def save_tokenizer_files(source: Path, directory: Path) -> None:
    """Write the tokenizer of a model directory or GGUF file into `directory`, for transformers and vLLM."""
    if source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, directory / name)
        return
    definition, settings = gguf_tokenizer(source)
    write_json(directory / "tokenizer.json", definition)
    write_json(directory / "tokenizer_config.json", settings)


def fetch(hub_id: str, patterns: Sequence[str]) -> Path:
    """The local copy of a Hugging Face hub repository. Raises ValueError that says what to do."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        raise ValueError(f"no model at {hub_id!r}: give a directory, a .gguf file or a Hugging Face id (owner/name)")
    import httpx
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, httpx.HTTPError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{hub_id!r} is no directory or .gguf file here, and the Hugging Face hub did not give it ({reason}); "
            "check the name and the network, or give the path of a downloaded model"
        ) from error


def locate(name: str | Path) -> Path:
    """The local path of a model; a hub id is downloaded. Raises ValueError where there is none."""
    path = Path(name)
    if path.exists():
        return path
    return fetch(str(name), ["*.json", "*.txt", "*.jinja", "*.safetensors"])


def gguf_tokenizer(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokenizer.json and tokenizer_config.json that the metadata of a GGUF file amounts to."""
    metadata = read_gguf(path).metadata
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre == "default":  # written before spring 2024
        log.warning("%s does not say how its tokenizer splits words (tokenizer.ggml.pre): Qwen2's way is taken", path)
    elif pre not in _QWEN2_PRE:
        raise ValueError(f"{path} has a tokenizer of kind {pre!r}; memjax reads Qwen2's ({', '.join(_QWEN2_PRE)})")
    tables = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
    if absent := [key for key in tables if key not in metadata]:
        raise ValueError(f"{path} lacks {', '.join(absent)}; convert the model to GGUF again, or use its directory")
    tokens, kinds, merges = (metadata[key] for key in tables)
    added_kinds = (_GGML_CONTROL, _GGML_USER_DEFINED)
    rows = [(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _GGML_UNUSED]
    added = [added_token(i, token, kind == _GGML_CONTROL) for i, token, kind in rows if kind in added_kinds]
    vocabulary = {token: i for i, token, kind in rows if kind not in added_kinds}
    definition = qwen2_definition(vocabulary, merges, added)

    def named(key: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id >= len(tokens):
            raise ValueError(f"{path} names token {token_id} as its {key} token, but has only {len(tokens)} tokens")
        return None if token_id is None else tokens[token_id]

    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "bos_token": named("bos") if metadata.get("tokenizer.ggml.add_bos_token") else None,
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": None,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": metadata.get("qwen2.context_length"),
    }
    return definition, settings


def qwen2_definition(
    vocabulary: Mapping[str, int], merges: Sequence[str], added_tokens: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of a tokenizer.json with Qwen2's normaliser and split around the given vocabulary."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocabulary),
            "merges": list(merges),
        },
    }


def added_token(token_id: int, content: str, special: bool) -> dict[str, Any]:
    """An entry of tokenizer.json's added_tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _directory_tokenizer(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = read_json(path / "tokenizer_config.json") or {}
    for name in ("config.json", "generation_config.json"):  # the later one wins, as it does in transformers
        declared = (read_json(path / name) or {}).get("eos_token_id")
        settings["eos_token_id"] = declared if declared is not None else settings.get("eos_token_id")
    templates: dict[str, Any] = {}  # the first one counts, as in transformers
    if (path / "chat_template.jinja").exists():
        templates["chat_template.jinja"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if (path / "chat_template.json").exists():
        templates["chat_template.json"] = (read_json(path / "chat_template.json") or {}).get("chat_template")
    templates["tokenizer_config.json"] = settings.get("chat_template")
    given = [(name, text) for name, value in templates.items() if (text := _default_template(value)) is not None]
    settings["chat_template"] = given[0][1] if given else None
    for name, text in given[1:]:
        if text.strip() != given[0][1].strip():
            log.warning("%s: the chat template of %s is taken; %s holds another", path, given[0][0], name)
    return read_json(path / "tokenizer.json") or _slow_definition(path), settings


def _slow_definition(path: Path) -> dict[str, Any]:
    """tokenizer.json as transformers makes it from vocab.json and merges.txt."""
    if not ((path / "vocab.json").exists() and (path / "merges.txt").exists()):
        raise ValueError(f"no tokenizer in {path}: it needs tokenizer.json, or vocab.json and merges.txt")
    from transformers import AutoTokenizer

    return json.loads(AutoTokenizer.from_pretrained(path).backend_tokenizer.to_str())


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None where there is no such file. Raises ValueError for anything else."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as people and other programs read it."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def token_text(token: Any) -> str | None:
    """A token as tokenizer_config.json names it: its text, or an object that holds it."""
    return token["content"] if isinstance(token, dict) else token


def _default_template(template: Any) -> str | None:
    """A config holds one template, or a list of named ones."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
