"""Makes the prompts of the measurements: English text that every Python installation has, and tasks made from it.

The text is Python's own documentation of its syntax (`pydoc_data.topics`), about 100,000 tokens, so that nothing has to be
downloaded and all machines measure the same.
"""

import random
import re
from dataclasses import dataclass

from transom_core.text.tokenizer import Tokenizer


def long_text(tokenizer: Tokenizer, num_tokens: int, *, skip_topics: int = 0) -> list[int]:
    """Return the first `num_tokens` tokens of the documentation without its first `skip_topics` topics."""
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics)[skip_topics:]:
        ids += tokenizer.encode(topics[name], add_special_tokens=False)
        if len(ids) >= num_tokens:
            break
    return ids[:num_tokens]


_NAMES = (
    *("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta"),
    *("Henry", "Irene", "Jacob", "Karen", "Lucas", "Maria"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallTask:
    """A prompt whose last `num_answer` tokens are determined by text far before them."""

    name: str
    token_ids: list[int]
    num_answer: int
    distance: int  # tokens between the answer and the text that determines it


def recall_tasks(tokenizer: Tokenizer, *, num_filler: int) -> list[RecallTask]:
    """Return three tasks: a needle in a haystack, brackets that were opened long before, and a repeated list.

    Needle and opening brackets are about `num_filler` tokens back; the list's period is about three quarters of that.
    """
    filler = long_text(tokenizer, num_filler, skip_topics=20)
    return [_needle(tokenizer, filler), _brackets(tokenizer, num_filler), _repetition(tokenizer, 3 * num_filler // 4)]


def _needle(tokenizer: Tokenizer, filler: list[int]) -> RecallTask:
    fact = tokenizer.encode("The secret code of the vault is: blue elephant 7319.\n\n", add_special_tokens=False)
    question = tokenizer.encode("\n\nAs said above, the secret code of the vault is:", add_special_tokens=False)
    answer = tokenizer.encode(" blue elephant 7319", add_special_tokens=False)
    start = tokenizer.encode("Read this text.\n", add_special_tokens=False)
    ids = [*start, *fact, *filler, *question, *answer]
    return RecallTask(name="needle", token_ids=ids, num_answer=len(answer), distance=len(filler) + len(question))


def _brackets(tokenizer: Tokenizer, num_filler: int) -> RecallTask:
    """Return a task with a long JSON list inside two objects: only its first tokens show how many braces must be closed after it.

    Short documents with one and with two objects come before it, so that the model knows both forms.
    """
    rng = random.Random(5)
    single, double = '{"list": [', '{"result": {"list": ['
    text = "".join(
        head + ", ".join(_item(rng, number) for number in range(3)) + "]" + "}" * head.count("{") + "\n"
        for head in 3 * (single, double)
    )
    num_before, items = len(tokenizer.encode(text, add_special_tokens=False)), [_item(rng, 0)]
    ids: list[int] = []
    while len(ids) < num_before + num_filler:
        items.append(_item(rng, len(items)))
        ids = tokenizer.encode(f"{text}{double}{', '.join(items)}]", add_special_tokens=False)
    answer = tokenizer.encode("}}\n", add_special_tokens=False)
    return RecallTask(
        name="brackets", token_ids=[*ids, *answer], num_answer=len(answer), distance=len(ids) - num_before
    )


def _item(rng: random.Random, index: int) -> str:
    return f'{{"id": {index + 1}, "name": "{rng.choice(_NAMES)}"}}'


def _repetition(tokenizer: Tokenizer, period: int) -> RecallTask:
    """Return a list of random words, three times: each word of the last copy comes one list after the word's last occurrence."""
    from pydoc_data.topics import topics

    words = sorted({word for text in topics.values() for word in re.findall(r"\b[a-z]{4,8}\b", text)})
    random.Random(3).shuffle(words)
    num_words, once = 0, list[int]()
    while len(once) < period:
        num_words += 8
        once = tokenizer.encode(" ".join(words[:num_words]) + ".\n", add_special_tokens=False)
    return RecallTask(name="repetition", token_ids=3 * once, num_answer=len(once) - 2, distance=len(once))
