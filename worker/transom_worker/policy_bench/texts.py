"""The texts of the measurements: English that every Python installation has, and tasks made of it.

The text is Python's own documentation of its syntax (`pydoc_data.topics`), some 100,000 tokens, so that nothing has to be
downloaded and all machines measure the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transom_worker.text.tokenizer import Tokenizer


def long_text(tokenizer: Tokenizer, num_tokens: int, *, skip_topics: int = 0) -> list[int]:
    """Return the first tokens of the documentation, from topic `skip_topics` on."""
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics)[skip_topics:]:
        ids += tokenizer.encode(topics[name], add_special_tokens=False)
        if len(ids) >= num_tokens:
            break
    return ids[:num_tokens]


_WORDS = ("red", "oak", "seven", "river", "stone", "cloud", "bread", "north", "glass", "tiger", "lamp", "iron")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallTask:
    """A prompt whose last `num_answer` tokens follow from something that stands far before them."""

    name: str
    token_ids: list[int]
    num_answer: int
    distance: int  # tokens between the answer and what it follows from


def recall_tasks(tokenizer: Tokenizer, *, num_filler: int) -> list[RecallTask]:
    """Return a needle in a haystack, brackets that were opened long ago, and a repeated list."""
    filler = long_text(tokenizer, num_filler, skip_topics=20)
    return [_needle(tokenizer, filler), _brackets(tokenizer, num_filler), _repetition(tokenizer, num_filler)]


def _needle(tokenizer: Tokenizer, filler: list[int]) -> RecallTask:
    fact = tokenizer.encode("The secret code of the vault is: blue elephant 7319.\n\n", add_special_tokens=False)
    question = tokenizer.encode("\n\nAs said above, the secret code of the vault is:", add_special_tokens=False)
    answer = tokenizer.encode(" blue elephant 7319", add_special_tokens=False)
    start = tokenizer.encode("Read this text.\n", add_special_tokens=False)
    ids = [*start, *fact, *filler, *question, *answer]
    return RecallTask(name="needle", token_ids=ids, num_answer=len(answer), distance=len(filler) + len(question))


def _brackets(tokenizer: Tokenizer, num_filler: int) -> RecallTask:
    """A JSON object with a wrapper opened at its beginning, which only its first tokens show."""
    head, text, number = '{"result": {"list": [', "", 0
    while len(tokenizer.encode(head + text, add_special_tokens=False)) < num_filler:
        number += 1
        text += ("" if number == 1 else ", ") + f'{{"id": {number}, "name": "item {number}"}}'
    ids = tokenizer.encode(head + text, add_special_tokens=False)
    answer = tokenizer.encode("]}}\n", add_special_tokens=False)
    return RecallTask(name="brackets", token_ids=[*ids, *answer], num_answer=len(answer), distance=len(ids))


def _repetition(tokenizer: Tokenizer, num_filler: int) -> RecallTask:
    """A list of random words, twice: each word of the second copy stands one list behind its first occurrence."""
    words = [
        word
        for word in (
            "red",
            "oak",
            "seven",
            "river",
            "stone",
            "cloud",
            "bread",
            "north",
            "glass",
            "tiger",
            "lamp",
            "iron",
        )
    ]
    rng = random.Random(3)
    chosen = [rng.choice(words) for _ in range(max(8, num_filler // 3))]
    once = tokenizer.encode("List: " + " ".join(chosen) + ".\n", add_special_tokens=False)
    return RecallTask(name="repetition", token_ids=[*once, *once], num_answer=len(once) - 2, distance=len(once))
