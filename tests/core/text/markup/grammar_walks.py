"""Random walks through a grammar: what a model that knows nothing would answer, if it is held to the grammar.

The vocabulary has every byte, some words, and the markers of all families, each of which is one token: a marker, or (`ordinary`)
a token of ordinary text. A walk prefers the tokens in `hints` where they are allowed, so that free text ends some day.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|tool_call|>"),
)
_WORDS = (
    *("{", "[", "Paris", "\n</parameter>", "Here is my response:", " the", "city", '": "', '", "', '"}', "true", " 12"),
    *("\\n", "\\u00e9", "é", "💧", '"', "}", "]", ">", "<", "</", "\n"),
)


class WalkTokenizer:
    """Single bytes, words and markers; 0 ends an answer."""

    eos_token_ids = (0,)
    eos_token_id = 0
    bos_token_id = None

    def __init__(self, *, ordinary: bool = False, markers: Iterable[str] = MARKERS) -> None:
        self.texts = ["<|end of answer|>", *_WORDS, *markers]
        first_marker = 1 + len(_WORDS)
        self.special_token_ids = [0, *([] if ordinary else range(first_marker, len(self.texts)))]
        self.tokens = [text.encode() for text in self.texts] + [bytes([byte]) for byte in range(256)]
        self._markers = {self.texts[i]: i for i in self.special_token_ids}
        self.library = LLTokenizer(TokenizerWrapper(self), slices=[])

    def __call__(self, data: bytes) -> list[int]:
        return [len(self.texts) + byte for byte in data]

    def marker_id(self, text: str) -> int | None:
        return self._markers.get(text)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_token_ids

    def token(self, token_id: int) -> str:
        return self.tokens[token_id].decode()

    def cut(self, text: str) -> list[int]:
        """The ids of a text: markers, and bytes."""
        marks = "|".join(map(re.escape, sorted(self.texts[1:], key=len, reverse=True)))
        pieces = re.split(f"({marks})", text)
        return [i for piece in pieces for i in (self.ids([piece]) if piece in self.texts[1:] else self(piece.encode()))]

    def ids(self, texts: Iterable[str]) -> list[int]:
        return [self.texts.index(text) for text in texts]


@dataclass(frozen=True)
class Walk:
    """An answer: its tokens with the text that each adds, as the router gives them to a parser."""

    tokens: list[tuple[int, str]]
    is_complete: bool

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.tokens)


def compiled(tokenizer: WalkTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar. Raises AssertionError where the grammar is not valid."""
    matcher = LLMatcher(tokenizer.library, grammar)
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def walk(
    tokenizer: WalkTokenizer,
    grammar: LLMatcher,
    *,
    seed: int,
    hints: Iterable[str] = (),
    begin: str = "",
    longest: int = 1500,
) -> Walk:
    """One random answer, of at most `longest` tokens, which begins with the text `begin`.

    `grammar` is a matcher at the beginning. Raises AssertionError where the grammar does not allow `begin`.
    """
    matcher = grammar.deep_copy()
    rng = random.Random(seed)
    hint_ids = tokenizer.ids(hints)
    first_ids = tokenizer.ids(("{", "[", *(hint for hint in hints if hint in MARKERS)))  # which may begin calls
    ids = tokenizer.cut(begin)
    for token_id in ids:
        assert matcher.consume_token(token_id), matcher.get_error()
    while len(ids) < longest and not matcher.is_stopped():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")  # by token id
        assert not matcher.get_error(), matcher.get_error()
        if allowed[0] and rng.random() < 0.2:
            return Walk(with_texts(tokenizer, ids), is_complete=True)
        choices = [i for i in (hint_ids if ids else first_ids) if allowed[i]]
        if not choices or rng.random() >= (0.3 if ids else 0.7):
            choices = np.flatnonzero(allowed[1:]).tolist()
            if not choices:
                return Walk(with_texts(tokenizer, ids), is_complete=True)
            choices = [i + 1 for i in choices]
        token_id = rng.choice(choices)
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)
    return Walk(with_texts(tokenizer, ids), is_complete=matcher.is_stopped())


def with_texts(tokenizer: WalkTokenizer, ids: list[int]) -> list[tuple[int, str]]:
    """Each token with its text: special tokens have none, and bytes of one character come with its last."""
    tokens: list[tuple[int, str]] = []
    rest = b""
    for token_id in ids:
        if tokenizer.is_special(token_id):
            tokens.append((token_id, ""))
            continue
        rest += tokenizer.tokens[token_id]
        try:
            tokens.append((token_id, rest.decode()))
            rest = b""
        except UnicodeDecodeError:
            tokens.append((token_id, ""))
    return tokens
