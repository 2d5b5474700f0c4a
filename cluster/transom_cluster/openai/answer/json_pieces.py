"""Writes JSON text in pieces, so that the server never holds the whole text of a large response.

A body is an ordinary dict, except that its long lists are `LazyList`s, which make their values while they are written. Example: the
log-probabilities of 100,000 tokens are kept in arrays of 25 MB, and become objects and text 64 positions at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

VALUES_PER_PIECE = 64  # writing 64 positions takes some milliseconds: a position has up to 21 log-probabilities
PIECE_CHARS = 65_536  # pieces are joined until they have this size, and then sent


class LazyList(list[T]):
    """Stands for a list in a JSON body. Each call of `make` returns the values from the start. The object itself, which is a list
    only for the type checker, stays empty."""

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        super().__init__()
        self.make = make


@dataclass(frozen=True, slots=True)
class JsonText:
    """Stands for a value in a JSON body whose JSON text has been made already, in ASCII."""

    text: str

    @classmethod
    def of(cls, value: Any) -> JsonText:
        """Make the text of a value."""
        return cls(_dumps(value, is_ascii=True))


def json_pieces(value: Any, *, is_ascii: bool = False) -> Iterator[str]:
    """Yield the JSON text of a body, in pieces of at most `VALUES_PER_PIECE` values of a `LazyList`.

    With `is_ascii` the text is ASCII, as server-sent events need it: some clients split lines at Unicode's line separators.
    """
    if isinstance(value, LazyList):
        yield from _lazy_pieces(value, is_ascii)
    elif isinstance(value, JsonText):
        yield value.text
    elif isinstance(value, dict):
        for at, (name, member) in enumerate(value.items()):
            yield f"{',' if at else '{'}{_dumps(name, is_ascii)}:"
            yield from json_pieces(member, is_ascii=is_ascii)
        yield "}" if value else "{}"
    elif isinstance(value, list) and any(isinstance(member, dict) for member in value):  # others have no LazyList
        for at, member in enumerate(value):
            yield "," if at else "["
            yield from json_pieces(member, is_ascii=is_ascii)
        yield "]"
    else:
        yield _dumps(value, is_ascii)


def joined_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """Join pieces into larger ones of at least `PIECE_CHARS` characters; the last one may be shorter."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= PIECE_CHARS:
            yield "".join(parts)
            parts, size = [], 0
    if parts:
        yield "".join(parts)


def batches(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield the values in lists of `VALUES_PER_PIECE`; the last one may be shorter."""
    iterator = iter(values)
    while batch := list(islice(iterator, VALUES_PER_PIECE)):
        yield batch


def _lazy_pieces(values: LazyList[Any], is_ascii: bool) -> Iterator[str]:
    yield "["
    for at, batch in enumerate(batches(values.make())):
        yield ("," if at else "") + _dumps(batch, is_ascii)[1:-1]  # without the batch's brackets
    yield "]"


def _dumps(value: Any, is_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=is_ascii, allow_nan=False, separators=(",", ":"))
