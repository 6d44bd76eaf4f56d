"""Reads on only until the model says that it knows the answer: a document is seldom read to its end."""

from pydantic import BaseModel, ConfigDict, Field

from memjax.rollout.client import Message


class StopsEarly(BaseModel):
    """Reads in chunks, and stops at the first reply that begins with `found`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    chunk: int = Field(default=4000, ge=16)
    """Tokens read in one turn."""
    answer: int = Field(default=512, ge=1)
    """Tokens of the longest reply."""
    found: str = "ANSWER:"
    """How a reply begins that ends the reading."""

    async def __call__(self, task, episode):
        seen = None
        async for chunk in episode.chunks(task.context, self.chunk):
            parts = [
                "You read a long text piece by piece, looking for the answer to a question.\n",
                f"Question: {task.question}\n",
            ]
            if seen is not None:
                parts += ["What you noted at the last piece:\n", seen, "\n"]
            parts += ["The next piece:\n", chunk.ids]
            parts.append(
                f"\nIf you are certain of the answer now, write `{self.found}` and then the answer. If not, note in "
                "one or two sentences what could matter later, your earlier note included."
            )
            message = Message("user", tuple(parts))
            reply = await episode.chat([message], max_tokens=self.answer, kind="read", chunk=chunk)
            if reply.text.strip().startswith(self.found):
                episode.count("stopped_early", chunk.start_token + len(chunk.ids) < chunk.document_tokens)
                return reply.text.strip().removeprefix(self.found).strip()
            seen = reply.part() or seen  # an empty reply forgets nothing
        prompt = [
            f"Question: {task.question}\nYour notes on a long text:\n",
            seen or "none",
            "\nAnswer in a few words.",
        ]
        return (await episode.chat([Message("user", tuple(prompt))], max_tokens=self.answer, kind="answer")).text
