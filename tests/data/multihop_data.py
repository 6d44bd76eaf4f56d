"""The data sets in tests/data/multihop, and a tokenizer that is quick and harsh."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "multihop"
HOTPOTQA = FOLDER / "hotpotqa_40.json.gz"
SQUAD = FOLDER / "squad_2_articles.json.gz"


class WordTokenizer:
    """Half a word, a digit or a mark is a token. Text as a whole has 1 % more tokens than its parts, if `surplus`."""

    def __init__(self, surplus: bool = False):
        self.surplus = surplus

    def count(self, text):
        return len(re.findall(r"[a-zA-Z]{1,4}|\d|[^\w\s]|[^\W\da-zA-Z]", text))

    def encode_stream(self, pieces):
        tokens = self.count("".join(pieces))
        return iter(range(tokens + tokens // 100 if self.surplus else tokens))
