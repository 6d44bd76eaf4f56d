"""Demonstrations for examples/bullets.py on the tiny task (memjax.data.tiny), in its vocabulary of whole words."""

from memjax.data.tiny import CHUNK_WORDS, NOTHING, facts_in, write_facts

LIST = 10  # tokens, as in configs/train/tiny_bullets.yaml
SLIPS = 0.6  # chance that a fact which nobody asked for is noted: what there is to unlearn


def script(task, rng):
    """What a hasty reader writes: a reply for every chunk, then the answer from the bullets that are left of them."""
    return written(task, lambda fact: rng.random() < SLIPS)


def careful(task, rng):
    """As `script`, without a slip."""
    return written(task, lambda fact: False)


def written(task, slips):
    """The replies of a reader who notes the fact that is asked for, and others where it slips."""
    words, (key,) = task.context.split(), task.extra["chain"]
    chunks = [" ".join(words[start : start + CHUNK_WORDS]) for start in range(0, len(words), CHUNK_WORDS)]
    replies = [write_facts([fact for fact in facts_in(chunk) if fact[0] == key or slips(fact)]) for chunk in chunks]
    bullets = [reply for reply in replies if reply != NOTHING]
    while sum(len(bullet.split()) for bullet in bullets) > LIST:
        del bullets[0]
    return [*replies, f"\\boxed{{ {dict(facts_in(' '.join(bullets))).get(key, NOTHING)} }}"]
