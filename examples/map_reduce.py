"""Asks every chunk the question side by side, merges what was found in groups, and answers from the rest."""

from memjax.rollout.client import Message

CHUNK, FOUND, ANSWER = 4000, 256, 512  # tokens of a part of the document, of what is found in it, of the answer
GROUP = 8  # findings that one prompt merges
WIDTH = 16  # calls that are made at a time


async def map_reduce(task, episode):
    """A plain function is an agent too; it has no keys."""

    async def ask(chunk):
        reply = await episode.chat(
            message(
                f"Question: {task.question}\nThis is one part of a long text:\n",
                chunk.ids,
                "\nQuote what in this part helps to answer the question, word for word and no more. If nothing does, "
                "write: none",
            ),
            max_tokens=FOUND,
            kind="map",
            chunk=chunk,
        )
        return None if reply.text.strip().lower() in ("", "none", "none.") else reply.part()

    async def merge(findings):
        reply = await episode.chat(
            message(
                f"Question: {task.question}\nThese passages were found in a long text:\n",
                *listed(findings),
                "\nKeep what helps to answer the question, and leave out the rest.",
            ),
            max_tokens=FOUND,
            kind="reduce",
        )
        return reply.part() or findings[0]

    chunks = [chunk async for chunk in episode.chunks(task.context, CHUNK)]
    asked = await episode.gather(*map(ask, chunks), width=WIDTH)
    found = [part for part in asked if part is not None]
    while len(found) > GROUP:
        groups = [found[first : first + GROUP] for first in range(0, len(found), GROUP)]
        found = await episode.gather(*map(merge, groups), width=WIDTH)
    last = message("Passages of a long text:\n", *listed(found), f"\nAnswer in a few words: {task.question}")
    return (await episode.chat(last, max_tokens=ANSWER, kind="answer")).text


def message(*parts):
    return [Message("user", parts)]


def listed(findings):
    return [part for one in findings or ["none"] for part in (one, "\n")]
