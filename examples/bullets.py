"""Keeps a list of bullets: a turn writes only what is new in its section, and the oldest go when the list is full."""

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from memjax.rollout.client import Message

READ = """A question is to be answered at the end of a long text, which you see one section at a time.
Question: {question}
Your notes so far:
{bullets}
The next section:
{chunk}
Write down what this section adds that helps with the question, one short bullet a line, and nothing that your notes
have already. If it adds nothing, write: none"""

ANSWER = """Your notes on a long text:
{bullets}
Answer this question from them: {question}
Put the answer in \\boxed{}."""


class Bullets(BaseModel):
    """A reader with a list of bullets. Sizes are in tokens."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    chunk: int = Field(default=4000, ge=16)
    """Document read in one turn."""
    bullets: int = Field(default=1024, ge=1)
    """The whole list."""
    new: int = Field(default=256, ge=1)
    """Most that one turn adds."""
    answer: int = Field(default=512, ge=1)
    """Longest answer."""
    prompts: Path | None = None
    """A directory with read.txt and answer.txt instead of the prompts above."""

    async def __call__(self, task, episode):
        read, answer, bullets = self.text("read", READ), self.text("answer", ANSWER), []
        async for chunk in episode.chunks(task.context, self.chunk):
            prompt = filled(read, question=task.question, bullets=bullets, chunk=chunk.ids)
            reply = await episode.chat(prompt, max_tokens=self.new, kind="bullets", chunk=chunk)
            if reply.text.strip().lower() not in ("", "none", "none."):
                bullets.append(reply.part())  # the very tokens that were written, in every later prompt
            while sum(size(reply, episode.tokenizer) for reply in bullets) > self.bullets:
                del bullets[0]
        prompt = filled(answer, question=task.question, bullets=bullets)
        return (await episode.chat(prompt, max_tokens=self.answer, kind="answer")).text

    def longest_turn(self, question, tokenizer, document_tokens=0):
        """What a turn may take by part, so that a window which is too small is told before anything is read."""
        fixed = len(tokenizer.render(filled(self.text("read", READ), question=question))) + 8
        return {"chunk": self.chunk, "bullets": self.bullets, "reply": max(self.new, self.answer), "prompt": fixed}

    def text(self, name, default):
        return (self.prompts / f"{name}.txt").read_text() if self.prompts else default


def size(part, tokenizer):
    return tokenizer.count(part) if isinstance(part, str) else len(part)


def filled(template, **parts):
    """The template as one message. A part is text or token ids, or a list of them, of which each has its line."""
    content = []
    for piece in re.split(r"(\{\w+\})", template):
        part = parts.get(piece[1:-1], "") if re.fullmatch(r"\{\w+\}", piece) else piece
        content += [line for one in part or ["none"] for line in ("\n", one)][1:] if isinstance(part, list) else [part]
    return [Message("user", tuple(part for part in content if len(part)))]
