"""The requests of a soak whose answers are known: each is asked in a calm phase first, and its answer must be the same ever after.

Case: one request without its `stream` field. Conversation: chat turns, each of which sends all earlier turns and answers again.
All of them are greedy or seeded, so that an answer depends on nothing but its request.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

COMMON_WORDS = (  # a token each in most vocabularies
    "time people water year work house world home school family story point week company group number room area money fact "
    "month night word study book eye job business issue side kind head hour game line member law car city name team "
    "minute idea body back parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force order plan place case end road map table river light"
)
WORDS = COMMON_WORDS.split()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATING = (CHAT, COMPLETIONS)
FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 2000  # ordinary tokens of the tiny vocabulary
NUM_CONVERSATIONS, NUM_TURNS = 8, 4
FILLING = "filling"


@dataclass(frozen=True, slots=True)
class Case:
    """One request by name, its path and its body."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says turn by turn, and the options of every turn."""

    name: str
    opening: list[dict[str, str]]
    turns: tuple[str, ...]
    options: dict[str, Any]

    def case(self, replies: Sequence[str]) -> Case:
        """The request of the turn that follows these replies."""
        messages = list(self.opening)
        for said, reply in zip(self.turns, replies, strict=False):
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": self.turns[len(replies)]})
        return Case(f"{self.name} turn {len(replies)}", CHAT, {"messages": messages, **self.options})


def words(source: random.Random, count: int) -> str:
    """A text of common words."""
    return " ".join(source.choices(WORDS, k=count))


def token_ids(source: random.Random, count: int) -> list[int]:
    """A prompt of exactly `count` tokens."""
    return [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


def make_cases(seed: int) -> list[Case]:
    """Single requests: every option that changes what is computed, prompts that share a beginning, short and long ones."""
    source = random.Random(f"{seed}/cases")
    shared = words(source, 60)
    filling = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return [
        *(Case(f"{FILLING} {i}", COMPLETIONS, filling | {"prompt": words(source, 60)}) for i in range(8)),
        *(Case(f"{kind} {i}", path, body) for i in range(3) for kind, path, body in _kinds(source, shared, i)),
    ]


def _kinds(source: random.Random, shared: str, i: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    prompt = f"{shared} {words(source, 5 + 20 * i)}"
    seed, length = source.randint(0, 10**6), 24 + 20 * i
    full = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
    greedy, seeded = {"temperature": 0}, {"temperature": 1.0, "seed": seed}
    yield "greedy", COMPLETIONS, full | greedy
    yield "seeded", COMPLETIONS, full | seeded
    yield "choices", COMPLETIONS, full | seeded | {"n": 2 + i}
    yield "logprobs", COMPLETIONS, full | greedy | {"logprobs": 5}
    yield "stop", COMPLETIONS, full | seeded | {"stop": ["e", " th", "qu"], "ignore_eos": False}
    yield "penalties", COMPLETIONS, full | seeded | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.9}
    yield "lists", COMPLETIONS, full | greedy | {"prompt": [token_ids(source, 40), token_ids(source, 90 + i)]}
    yield "long", COMPLETIONS, full | greedy | {"prompt": token_ids(source, 900 + 350 * i), "max_tokens": 12}
    yield "echo", COMPLETIONS, full | greedy | {"prompt": token_ids(source, 120), "echo": True, "logprobs": 1}
    yield (
        "chat",
        CHAT,
        {
            "messages": [{"role": "user", "content": words(source, 30)}],
            "max_tokens": length,
            "logprobs": True,
            "top_logprobs": 3,
            **(greedy if i % 2 else seeded),
        },
    )
    yield "wide", COMPLETIONS, full | seeded | {"max_tokens": 120, "n": 2, "logprobs": 20}  # much to read


def make_conversations(seed: int) -> list[Conversation]:
    """Conversations that come back; every other one begins with a long message, and all begin with one of two system texts."""
    source = random.Random(f"{seed}/conversations")
    systems = [words(source, 40) for _ in range(2)]
    return [
        Conversation(
            f"conversation {i}",
            [{"role": "system", "content": systems[i % 2]}],
            tuple(words(source, 250 if i % 4 == 1 and turn == 0 else 12) for turn in range(NUM_TURNS)),
            {"max_tokens": 24, "temperature": float(i % 2), "seed": i, "ignore_eos": True},
        )
        for i in range(NUM_CONVERSATIONS)
    ]
