"""Reads long JSON arrays of token ids in pieces, so that no call holds the GIL for more than a millisecond or two.

Equal ids of a long array share one int object: an id of three digits is 4 bytes of the body, and an object of its own, with the
list's pointer to it, takes 40.
"""

from collections.abc import Iterator, Sequence

import msgspec

from transom_cluster.openai.request.body import decode_field
from transom_cluster.openai.request.field_errors import field_error
from transom_core.errors import RequestError

PIECE_BYTES = 64 * 2**10
PIECE_IDS = 16 * 2**10

_IDS: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[int])
_LISTS: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(list[list[int]])


def count_ids(text: bytes) -> int:
    """Return the number of ids in an array, or in all arrays of an array of arrays. An empty array counts as one id."""
    return 1 + sum(text.count(b",", start, start + PIECE_BYTES) for start in range(0, len(text), PIECE_BYTES))


def read_ids(text: bytes, name: str, shared: dict[int, int] | None = None) -> list[int]:
    """Return the ids of the array `text`, which is the field `name`. `shared` maps each id to the one object that stands for it.

    Raises:
        RequestError: an element is not a whole number; `param` names the element.
    """
    if not text.startswith(b"[") or (len(text) <= PIECE_BYTES and shared is None):
        return decode_field(_IDS, text, name)
    shared = {} if shared is None else shared
    ids: list[int] = []
    for piece in _pieces(text):
        try:
            read = _IDS.decode(piece)
        except msgspec.ValidationError as error:
            raise field_error(error, piece, name=name, first_index=len(ids)) from None
        ids += [shared.setdefault(token_id, token_id) for token_id in read]
    return ids


def read_id_lists(text: bytes, name: str) -> list[list[int]]:
    """Return the ids of each array in the array `text`, which is the field `name`.

    Raises:
        RequestError: an element is not an array of whole numbers; `param` names the element.
    """
    if len(text) <= PIECE_BYTES:
        return decode_field(_LISTS, text, name)
    lists: list[list[int]] = []
    shared: dict[int, int] = {}
    at = 1
    while (start := text.find(b"[", at)) >= 0:
        end = text.find(b"]", start) + 1
        _check_between(text[at:start], b"," if lists else b"", name, len(lists))
        lists.append(read_ids(text[start:end], f"{name}[{len(lists)}]", shared))
        at = end
    _check_between(text[at:], b"]", name, len(lists))
    return lists


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raise RequestError for a token id outside the vocabulary; `param` names the field."""
    for start in range(0, len(token_ids), PIECE_IDS):
        piece = token_ids[start : start + PIECE_IDS]
        if not 0 <= min(piece) <= max(piece) < vocab_size:
            wrong = next(token_id for token_id in piece if not 0 <= token_id < vocab_size)
            raise RequestError(f"{param} has token id {wrong}; ids are from 0 to {vocab_size - 1}.", param=param)


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield the array `text` as several arrays, cut at commas."""
    start, last = 1, len(text) - 1
    while start <= last:
        end = text.find(b",", start + PIECE_BYTES)
        end = last if end < 0 else end
        yield b"[" + text[start:end] + b"]"
        start = end + 1


def _check_between(text: bytes, expected: bytes, name: str, index: int) -> None:
    if text.strip() != expected:
        path = f"{name}[{index}]"
        raise RequestError(
            f"{path} is not an array of token ids, but the element before it is; send only arrays.", param=path
        )
