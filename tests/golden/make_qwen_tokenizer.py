"""Writes qwen_tokenizer.json: the ids that transformers gives for texts and chats with the tokenizer in tests/data.

python tests/golden/make_qwen_tokenizer.py      (from the repository's root, where transformers is installed)
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.qwen_tokenizer import write_qwen_tokenizer

TEXTS = [
    "",
    "Call me Ishmael. Some years ago, never mind how long precisely, I'd little or no money.",
    "In 1851 it cost 3,141.59 dollars (about 12%).",
    "  leading, trailing and\tinner   white space \n\n\n  indented\r\nline  ",
    "caf\u00e9 and cafe\u0301: one word, composed and decomposed",
    "Größe, naïve, Ångström, Łódź",
    "他们在船上看见了一条白色的鲸鱼，然后就不见了。",
    "한국어 문장과 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "हिन्दी में एक वाक्य, العربية, עברית, ไทย",
    "🐋 and 👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "She said 'it's HERE'S we'll, they'RE'",
]

CHATS = [
    [["user", "Who wrote it?"]],
    [["system", "Answer in one word."], ["user", "Who wrote\n\nit?"]],
    [["user", "a\n"], ["assistant", " b "], ["user", "\n\nc"]],
    [["system", ""], ["user", "  x"]],
]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = AutoTokenizer.from_pretrained(write_qwen_tokenizer(Path(directory)))
    chats = []
    for turns in CHATS:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        chats.append({"messages": turns, "ids": tokenizer.encode(text, add_special_tokens=False)})
    golden = {
        "made_by": f"transformers {transformers.__version__}",
        "texts": [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TEXTS],
        "chats": chats,
    }
    path = Path(__file__).with_name("qwen_tokenizer.json")
    path.write_text(json.dumps(golden, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main()
