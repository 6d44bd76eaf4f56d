"""Demonstrations for examples/bullets.py on the tiny task (memjax.data.tiny), in its vocabulary of whole words."""

from memjax.data.tiny import CHUNK_WORDS, NOTHING, facts_in, write_facts

LIST = 10  # tokens, as in configs/train/tiny_bullets.yaml


def careful(task, rng):
    """Only what the question needs."""
    return written(task, lambda fact: fact[0] in task.extra["chain"])


def careless(task, rng):
    """Every fact, whatever was asked, until the list is full and the first are gone."""
    return written(task, lambda fact: True)


def written(task, wanted):
    """A reply for every chunk, then the answer from the bullets that are left of them."""
    words = task.context.split()
    chunks = [" ".join(words[start : start + CHUNK_WORDS]) for start in range(0, len(words), CHUNK_WORDS)]
    replies = [write_facts([fact for fact in facts_in(chunk) if wanted(fact)]) for chunk in chunks]
    bullets = [reply for reply in replies if reply != NOTHING]
    while sum(len(bullet.split()) for bullet in bullets) > LIST:
        del bullets[0]
    known = dict(facts_in(" ".join(bullets)))
    return [*replies, f"\\boxed{{ {known.get(task.extra['chain'][0], NOTHING)} }}"]
