"""Text to token ids and back, and prompts put together in token space. No jax, no torch."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memjax.tokenizer_files import byte_alphabet, read_tokenizer_files, save_tokenizer_files, token_text

if TYPE_CHECKING:
    import jinja2

# Qwen checkpoints end a chat turn with the first and a text with the second; a config names only one of them.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")

_STREAM_BLOCK = 1 << 15  # characters that are encoded together when text streams in
_UNSETTLED_WORDS = 3  # pre-tokens at the end of a text that more text may still change: see _settled


class ToolCallLike(Protocol):
    """What `render` reads of memjax.rollout.client.ToolCall."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def json(self) -> str: ...  # noqa: D102


class MessageLike(Protocol):
    """What `render` reads of memjax.rollout.client.Message."""

    @property
    def role(self) -> str: ...  # noqa: D102
    @property
    def content(self) -> Sequence[str | Sequence[int]]: ...  # noqa: D102
    @property
    def tool_calls(self) -> Sequence[ToolCallLike]: ...  # noqa: D102
    @property
    def tool_call_id(self) -> str | None: ...  # noqa: D102
    @property
    def name(self) -> str | None: ...  # noqa: D102


class PromptLike(Protocol):
    """What `render_prompt` reads of memjax.rollout.client.Prompt."""

    @property
    def messages(self) -> Sequence[MessageLike]: ...  # noqa: D102
    @property
    def shared_parts(self) -> int: ...  # noqa: D102
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...  # noqa: D102


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt's ids; the first `shared` of them are the same in every prompt that shares its leading parts."""

    ids: list[int]
    shared: int = 0


class Tokenizer:
    """A byte-level tokenizer with its chat template.

    Text never becomes a control token: a document that contains "<|im_end|>" is read as those ten characters. Control
    tokens come from the chat template's own text and from parts that are ids already. The same holds for what tools and
    tool calls say.
    """

    def __init__(self, definition: Mapping[str, Any], settings: Mapping[str, Any], source: Path):
        """Build from the content of a tokenizer.json and of a tokenizer_config.json.

        `settings` may hold `eos_token_id`, one id or a list, beside the tokens that it names.
        """
        import tokenizers

        self.source = source
        if (definition.get("decoder") or {}).get("type") != "ByteLevel":
            raise ValueError(f"the tokenizer in {source} is not byte-level; memjax reads Qwen2's byte-level BPE")
        added = definition.get("added_tokens") or []
        self._special_ids = frozenset(token["id"] for token in added if token["special"])
        self._added_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        # Without added tokens nothing in a text can become one; without post-processor no token is put in front.
        plain = {**definition, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._vocabulary: dict[str, int] = {**self._plain.get_vocab(), **self._added_ids}
        self.size = max(self._vocabulary.values()) + 1
        self.eos_ids = self._end_ids(settings)
        pad = token_text(settings.get("pad_token"))
        self.pad_id = self._added_ids.get(pad or _END_TOKENS[1], self.eos_ids[0])
        self._chat_template = settings.get("chat_template")
        names = ("bos_token", "eos_token", "pad_token")
        self._template_names = {name: text for name in names if (text := token_text(settings.get(name))) is not None}

    @classmethod
    def load(cls, name: str | Path) -> Tokenizer:
        """Load from a model directory, a .gguf file or a hub id. Raises ValueError that says what to do."""
        return cls(*read_tokenizer_files(name))

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are chats; a base model reads its parts one after another."""
        return self._chat_template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any control token. ValueError for half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a text holds {text[error.start]!r}, half of a Unicode surrogate pair") from None
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_reply(self, text: str) -> list[int]:
        """The ids of a text that stands for a model's reply: added tokens that have a text, <tool_call>, are ids."""
        parts = self._added_pattern.split(text) if self._added_ids else [text]
        ids = (self._added_ids.get(part) for part in parts)
        return [
            i
            for part, own in zip(parts, ids, strict=True)
            for i in (self.encode(part) if own is None or own in self._special_ids else [own])
        ]

    def count(self, text: str) -> int:
        """How many ids `text` has."""
        return len(self.encode(text))

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[int]:
        """The ids of the pieces' concatenation, with memory for a block and its longest word only."""
        buffer, block = "", _STREAM_BLOCK
        for piece in pieces:
            buffer += piece
            if len(buffer) < block:
                continue
            ids, end = self._settled(buffer)
            yield from ids
            buffer = buffer[end:]
            block = max(_STREAM_BLOCK, 2 * len(buffer))  # a word without end is not encoded again for every piece
        yield from self.encode(buffer)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one id adds to the text: nothing for control tokens and for ids that the vocabulary lacks."""
        return self._bytes_by_id[token_id] if 0 <= token_id < self.size else b""

    def pieces_of(self, ids: Sequence[int]) -> list[bytes]:
        """What each id adds to the text."""
        return [self._bytes_by_id[token_id] for token_id in ids]

    def ids_of(self, pieces: Sequence[bytes]) -> list[int]:
        """The ids of which `pieces_of` gave the bytes. ValueError for bytes that are no token of plain text."""
        try:
            return [self._ids_by_bytes[piece] for piece in pieces]
        except KeyError as error:
            raise ValueError(
                f"the tokenizer of {self.source} has no token {error.args[0]!r} for text: use the one that cut it"
            ) from None

    def char_boundary(self, ids: Sequence[int], n: int) -> int:
        """The largest k <= n such that ids[:k] does not end inside a UTF-8 character."""
        k = min(n, len(ids))
        while k > 0 and _is_inside_character(self._last_bytes(ids, k)):
            k -= 1
        return k

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a chat: its parts placed in the model's chat template.

        Text parts that adjoin are joined before they are encoded; ids go in verbatim. A last message of the assistant
        is left open, to be continued. Raises ValueError when the template refuses the messages, loses one, or does not
        know tools.
        """
        pieces, _ = self._pieces(messages, tools, generation_prompt)
        return self._join(pieces, shared_pieces=0).ids

    def render_prompt(self, prompt: PromptLike) -> RenderedPrompt:
        """Like `render`, with the count of leading ids that every prompt with the same shared parts begins with."""
        pieces, before_last = self._pieces(prompt.messages, prompt.tools, generation_prompt=True)
        most = len(prompt.messages[-1].content)
        if not 0 <= prompt.shared_parts <= most:
            raise ValueError(f"shared_parts is {prompt.shared_parts}, but the last message has {most} parts")
        return self._join(pieces, before_last + prompt.shared_parts if prompt.shared_parts else 0)

    def save(self, directory: Path) -> None:
        """Write the tokenizer files that transformers and vLLM read into `directory`."""
        save_tokenizer_files(self.source, directory)

    def _end_ids(self, settings: Mapping[str, Any]) -> tuple[int, ...]:
        declared = settings.get("eos_token_id")
        ids = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
        names = [token_text(settings.get("eos_token")), *_END_TOKENS]
        ids += [self._added_ids[name] for name in names if name in self._added_ids]
        if not ids:
            raise ValueError(f"the tokenizer in {self.source} has no end token; name it in tokenizer_config.json")
        if not all(0 <= token_id < self.size for token_id in ids):
            raise ValueError(f"{self.source} declares end tokens {ids}, but has only {self.size} tokens")
        return tuple(dict.fromkeys(ids))

    @cached_property
    def _bytes_by_id(self) -> list[bytes]:
        table = [b""] * self.size
        to_latin = {ord(char): byte for byte, char in byte_alphabet().items()}
        for token, token_id in self._vocabulary.items():
            if token not in self._added_ids:
                table[token_id] = token.translate(to_latin).encode("latin-1", errors="ignore")
            elif token_id not in self._special_ids:
                table[token_id] = token.encode()
        return table

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        plain = self._plain.get_vocab().values()  # an added token may read like a plain one, which text never becomes
        return {self._bytes_by_id[token_id]: token_id for token_id in plain}

    def _last_bytes(self, ids: Sequence[int], end: int) -> bytes:
        tail, start = b"", end
        while len(tail) < 4 and start > 0:  # a character has at most four bytes
            start -= 1
            tail = self.token_bytes(int(ids[start])) + tail
        return tail

    def _settled(self, text: str) -> tuple[list[int], int]:
        """The leading ids of `text` that hold whatever text follows, and how many characters they cover.

        More text can lengthen the last word, or join runs of white space and line ends into one word, so the last three
        pre-tokens stay open; a cut is made only where Unicode normalisation cannot join what it parts.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        words = [-1 if word is None else word for word in encoding.word_ids]
        offsets = encoding.offsets
        for i in range(len(words) - 1, 0, -1):
            start = offsets[i][0]
            if words[i] == words[i - 1] or words[i] > words[-1] - _UNSETTLED_WORDS + 1:
                continue
            if _never_composes(text[start]):
                return encoding.ids[:i], start
        return [], 0

    def _join(self, pieces: Sequence[str | Sequence[int]], shared_pieces: int) -> RenderedPrompt:
        """Encode runs of text as one; `shared` counts the ids that the first `shared_pieces` pieces settle."""
        ids: list[int] = []
        run: list[str] = []
        shared = 0
        for index, piece in enumerate([*pieces, []]):
            if shared_pieces and index == shared_pieces:
                shared = len(ids) + len(self._settled("".join(run))[0])
            if isinstance(piece, str):
                run.append(piece)
                continue
            ids += self.encode("".join(run))
            run.clear()
            ids += self._checked(piece)
        return RenderedPrompt(ids, shared)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        checked = [int(token_id) for token_id in ids]
        if checked and not (min(checked) >= 0 and max(checked) < self.size):
            raise ValueError(f"a part holds ids {min(checked)} to {max(checked)}, but there are {self.size} tokens")
        return checked

    def _pieces(
        self, messages: Sequence[MessageLike], tools: Sequence[Mapping[str, Any]], generation_prompt: bool
    ) -> tuple[list[str | Sequence[int]], int]:
        """The prompt as texts and ids in order, and the index at which the last message's content begins."""
        if not messages:
            raise ValueError("a prompt needs at least one message")
        continued = messages[-1].role == "assistant"
        if continued and messages[-1].tool_calls:
            raise ValueError("a prompt cannot end with tool calls: the messages of their results come after them")
        said = _SaidText(self._hidden_pattern)
        literals = self._literals(messages, tools, generation_prompt and not continued, said)
        pieces: list[str | Sequence[int]] = []
        start = 0
        for literal, message in zip(literals, filter(_has_content, messages), strict=False):
            pieces += self._literal_pieces(literal, said)
            start = len(pieces)
            pieces += message.content
        if not continued:
            pieces += self._literal_pieces(literals[-1], said)
        return pieces, start

    def _literals(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[Mapping[str, Any]],
        generation_prompt: bool,
        said: _SaidText,
    ) -> list[str]:
        """What the template writes before, between and after the messages' contents."""
        if self._chat_template is None:
            if tools or any(message.tool_calls for message in messages):
                raise ValueError(f"{self.source} has no chat template, so it cannot show tools: use a chat model")
            return [""] * (sum(map(_has_content, messages)) + 1)
        marks = [f"[[content of message {i}]]" if _has_content(m) else "" for i, m in enumerate(messages)]
        chat = [_for_template(message, mark, said) for message, mark in zip(messages, marks, strict=True)]
        shown = [said.hide_in(tool) for tool in tools]
        text = self._render_template(chat, shown, generation_prompt)
        found = [int(number) for number in _MARK.findall(text)]
        counted = Counter(found)
        for i, (message, mark) in enumerate(zip(messages, marks, strict=True)):
            if mark and (times := counted[i]) != 1:
                raise ValueError(
                    f"the chat template of {self.source} writes the content of a {message.role} message {times} times; "
                    "it must write every content once, unchanged"
                )
        called = [call["function"]["name"] for message in chat for call in message.get("tool_calls", ())]
        if not set(called) <= {hidden[0] for hidden in _HIDDEN.finditer(text)}:
            raise ValueError(
                f"the chat template of {self.source} does not write tool calls: use a model that knows them"
            )
        if tools and text == self._render_template(chat, [], generation_prompt):
            raise ValueError(f"the chat template of {self.source} ignores tools: use a model that knows them")
        if found != sorted(found):
            raise ValueError(f"the chat template of {self.source} changes the order of the messages")
        return _MARK.split(text)[::2]

    def _render_template(
        self, chat: list[dict[str, Any]], tools: list[Mapping[str, Any]], generation_prompt: bool
    ) -> str:
        import jinja2

        names = {"tools": tools, **self._template_names} if tools else self._template_names
        try:
            return self._template.render(messages=chat, add_generation_prompt=generation_prompt, **names)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of {self.source} refuses these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compile_template(self._chat_template or "")

    def _literal_pieces(self, literal: str, said: _SaidText) -> list[str | Sequence[int]]:
        """The template's own text, its control tokens as ids, and what tools and tool calls say in it as text."""
        parts = self._added_pattern.split(literal) if self._added_ids else [literal]
        return [[self._added_ids[part]] if part in self._added_ids else said.show(part) for part in parts if part]

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @cached_property
    def _hidden_pattern(self) -> re.Pattern[str]:
        """What a template's reader could take for something else in the words of tools."""
        return re.compile(rf"{self._added_pattern.pattern}|\[\[|{_OPEN}") if self._added_ids else _MARK_START


class _SaidText:
    """Text of tools and tool calls that a template writes, hidden from it where it could be taken for something else.

    What is hidden, all that `pattern` finds, becomes a number between two private characters, which no quoting changes.
    """

    def __init__(self, pattern: re.Pattern[str]):
        self._hidden: list[str] = []
        self._pattern = pattern

    def hide(self, text: str) -> str:
        """A stand-in for the whole text."""
        self._hidden.append(text)
        return f"{_OPEN}{len(self._hidden) - 1}{_CLOSE}"

    def hide_in(self, value: Any) -> Any:
        """A JSON value whose texts hold no control token and no mark of a content."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self.hide(found[0]), value)
        if isinstance(value, Mapping):
            return {self.hide_in(key): self.hide_in(item) for key, item in value.items()}
        return [self.hide_in(item) for item in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """The text as it was meant."""
        return _HIDDEN.sub(lambda found: self._hidden[int(found[1])], text)


_MARK = re.compile(r"\[\[content of message (\d+)\]\]")
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK_START = re.compile(rf"\[\[|{_OPEN}")
_HIDDEN = re.compile(rf"{_OPEN}(\d+){_CLOSE}")


def _has_content(message: MessageLike) -> bool:
    """Whether a template is given a content; an assistant message that only calls tools has none."""
    return not message.tool_calls or any(len(part) for part in message.content)


def _for_template(message: MessageLike, content: str, said: _SaidText) -> dict[str, Any]:
    """A message as templates take it, as transformers hands it to them: with arguments as an object."""
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        functions = [
            {"name": said.hide(call.name), "arguments": said.hide_in(_arguments(call.json))}
            for call in message.tool_calls
        ]
        ids = [said.hide_in(call.id) for call in message.tool_calls]
        shown["tool_calls"] = [
            {"id": id_, "type": "function", "function": function} for id_, function in zip(ids, functions, strict=True)
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            shown[name] = said.hide_in(value)
    return shown


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a template then quotes it


class StreamDecoder:
    """Turns ids into text as they come, never half a character; what it gave, joined, is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this id."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD when the last character stayed incomplete."""
        return self._utf8.decode(b"", final=True)


def _compile_template(text: str) -> jinja2.Template:
    """The environment that templates are written for: transformers' (blocks trimmed, JSON with plain Unicode)."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text)


def _is_inside_character(tail: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(tail)
    return bool(decoder.getstate()[0])


def _never_composes(char: str) -> bool:
    """Whether NFC leaves `char` apart from what stands before it: no mark, no vowel or final of a Hangul block."""
    is_jamo = "\u1160" <= char <= "\u11ff"
    if char in "\t\n\r":
        return True
    return char <= "\uffff" and not is_jamo and unicodedata.category(char)[0] in "LNPSZ"
