"""Records what OpenAI's own library finds in random harmony answers, for `test_harmony.py`: harmony_answers.json beside this file.

    TIKTOKEN_ENCODINGS_BASE=folder python tests/core/text/markup/record_harmony_answers.py

needs `openai-harmony` 0.0.8, which is no dependency of the project: its vocabulary is not in the package, but downloaded, or read
from `o200k_base.tiktoken` in that folder. An answer is recorded as pieces: [text, 1 where it is one special token], and with
it the messages that the library reads, or null where it raises an error.
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("harmony_answers.json")
_NUM_ANSWERS = 240
_WORDS = (
    "Rain?",
    "No.",
    "Let me look:",
    "naïve café 👩‍💻",
    "<|end|>",
    "a\nb",
    "{}",
    "to=functions.f",
    "analysis",
    "東京",
)
_ARGUMENTS = ({}, {"city": "Paris", "n": 3}, {"text": 'say "hi" <|call|>\n', "o": {"x": [1, None]}})
_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")

Piece = tuple[str, int]


def main() -> None:
    """Write the record."""
    harmony = importlib.import_module("openai_harmony")
    encoding = harmony.load_harmony_encoding("HarmonyGptOss")
    rng = random.Random(18)
    record = []
    for number in range(_NUM_ANSWERS):
        pieces = _answer(rng, is_broken=number % 3 == 2)
        ids = [i for piece in pieces for i in _encode(encoding, *piece)]
        record.append({"pieces": pieces, "messages": _messages(harmony, encoding, ids)})
    RECORD.write_text("[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in record) + "\n]\n", "utf-8")


def _encode(encoding: Any, text: str, is_special: int) -> list[int]:
    ids: list[int] = encoding.encode(text, allowed_special="all" if is_special else set(), disallowed_special=())
    return ids


def _messages(harmony: Any, encoding: Any, ids: list[int]) -> list[dict[str, Any]] | None:
    try:
        messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
    except harmony.HarmonyError:
        return None
    return [
        {"channel": each.channel, "recipient": each.recipient, "text": "".join(part.text for part in each.content)}
        for each in messages
    ]


def _answer(rng: random.Random, *, is_broken: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for number in range(rng.randint(1, 4)):
        pieces += [("<|start|>", 1), ("assistant", 0)] if number else []
        pieces += _message(rng)
    if pieces[-1][0] == "<|end|>" and rng.random() < 0.5:
        pieces.pop()
    if is_broken:
        at = rng.randrange(len(pieces))
        pieces[at : at + rng.randint(0, 1)] = (
            [(rng.choice(_MARKERS), 1)] if rng.random() < 0.5 else [(rng.choice(_WORDS), 0)]
        )
    return pieces


def _message(rng: random.Random) -> list[Piece]:
    if rng.random() < 0.4:
        return _call(rng)
    text = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 4)))
    channel = rng.choice(("analysis", "analysis", "commentary", "final"))
    return [("<|channel|>", 1), (channel, 0), ("<|message|>", 1), (text, 0), ("<|end|>", 1)]


def _call(rng: random.Random) -> list[Piece]:
    recipient = f" to=functions.{rng.choice(('f', 'get_weather'))}"
    constrain: list[Piece] = rng.choice(([("<|constrain|>", 1), ("json", 0)], []))
    channel = rng.choice(("commentary", "analysis"))
    header: list[Piece] = (
        [(recipient, 0), ("<|channel|>", 1), (channel, 0)]
        if rng.random() < 0.5
        else [("<|channel|>", 1), (f"{channel}{recipient} ", 0)]
    )
    arguments = json.dumps(rng.choice(_ARGUMENTS), ensure_ascii=False)
    return [*header, *constrain, ("<|message|>", 1), (arguments, 0), ("<|call|>", 1)]


if __name__ == "__main__":
    main()
