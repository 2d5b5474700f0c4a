"""Finds turn boundaries, the positions in a chat's tokens at which messages end, and the positions of cache marks.

A message's end in the text is a turn boundary if the text up to there, tokenised alone, gives the first tokens of the whole chat.
Nearly every template puts a **marker** there, an added token such as `<|im_start|>`. The tokenizer splits text at markers before
anything else, so no token crosses a marker, and the n-th occurrence of a marker in the text is the n-th occurrence of its token id:

    text     <|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵     the first message ends at the second <|im_start|>
    tokens   1           4093 198 17 2    198 1           520 198     token 6 is the second 1: the turn boundary is 6

So one pass over text and tokens finds every boundary without the tokens' offsets, for which the tokenizer would make Python objects
while it holds the GIL.

Without a marker, the text up to the message's end is tokenised alone and compared. Each comparison takes time in proportion to that
text, so only the first message and the latest ones are compared, up to a total length.

A cache mark may be inside a message. Its position is the number of tokens that the text up to the mark and the chat have in common.
Only the text from the last turn boundary with a marker to the mark is tokenised for it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

# Comparisons may tokenise FREE_CHARS characters (about 25,000 tokens, 60 ms), or MAX_COMPARED_TEXTS times the chat's, if more.
FREE_CHARS = 100_000
MAX_COMPARED_TEXTS = 4


class Markers:
    """The markers of a tokenizer; `ids` maps a marker's text to its token id."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._lengths = sorted({len(text) for text in ids}, reverse=True)

    def at(self, text: str, position: int) -> str | None:
        """Return the longest marker that begins at this position of the text; None if there is none."""
        return next((found for n in self._lengths if (found := text[position : position + n]) in self.ids), None)

    def before(self, text: str, position: int) -> str | None:
        """Return the longest marker that ends at this position of the text; None if there is none."""
        lengths = (n for n in self._lengths if n <= position)
        return next((found for n in lengths if (found := text[position - n : position]) in self.ids), None)


class ChatTokens:
    """A chat's text and its tokens; `encode` tokenises another text in the same way."""

    def __init__(
        self, text: str, token_ids: Sequence[int], *, markers: Markers, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self._text = text
        self._token_ids = token_ids
        self._markers = markers
        self._encode = encode
        self._places: dict[str, dict[int, int]] = {}  # marker -> (position in the text -> index of its token)

    def turn_boundaries(self, ends: Iterable[int]) -> tuple[int, ...]:
        """Return the turn boundaries; `ends` are the ascending positions in the text at which messages end."""
        found = {end: self._at_marker(end) for end in ends}
        unknown = [end for end, count in found.items() if count is None]
        num_chars = max(FREE_CHARS, MAX_COMPARED_TEXTS * len(self._text))  # characters that may still be tokenised
        for end in [*unknown[:1], *reversed(unknown[1:])]:  # the first message, then the latest ones
            num_chars -= end
            if num_chars >= 0:
                found[end] = self._compared(end)
        return tuple(sorted({count for count in found.values() if count}))

    def cache_marks(self, marks: Iterable[int], ends: Sequence[int]) -> tuple[int, ...]:
        """Return the positions in tokens of `marks`, ascending positions in the text; `ends` are those at which messages end."""
        found: set[int] = set()
        for mark in marks:
            begins = ((end, self._at_marker(end)) for end in reversed(ends) if end <= mark)
            begin, first = next(((end, count) for end, count in begins if count is not None), (0, 0))
            token_ids = self._encode(self._text[begin:mark]) if begin < mark else ()
            pairs = zip(token_ids, self._token_ids[first:], strict=False)
            found.add(first + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return tuple(sorted(found - {0}))

    def _at_marker(self, end: int) -> int | None:
        """Return the number of tokens up to `end`; None if there is no marker on either side of it."""
        if end == len(self._text):
            return len(self._token_ids)
        after = self._markers.at(self._text, end)
        if after is not None and (token := self._tokens_of(after).get(end)) is not None:
            return token
        before = self._markers.before(self._text, end)
        if before is not None and (token := self._tokens_of(before).get(end - len(before))) is not None:
            return token + 1
        return None

    def _tokens_of(self, marker: str) -> dict[int, int]:
        """Return position in the text -> index of the token, for this marker.

        The result is empty if one of its occurrences is not a token of its own, for example because it is part of a longer marker.
        """
        places = self._places.get(marker)
        if places is None:
            positions = [match.start() for match in re.finditer(re.escape(marker), self._text)]
            tokens = _indexes(self._token_ids, self._markers.ids[marker])
            places = dict(zip(positions, tokens, strict=True)) if len(positions) == len(tokens) else {}
            self._places[marker] = places
        return places

    def _compared(self, end: int) -> int | None:
        """Return the number of tokens of the text up to `end`; None if these are not the chat's first tokens."""
        token_ids = self._encode(self._text[:end])
        return len(token_ids) if token_ids == self._token_ids[: len(token_ids)] else None


def _indexes(values: Sequence[int], value: int) -> list[int]:
    """Return the indexes of `value` in `values`. `index` searches in C, which matters for prompts of 100,000 tokens."""
    found, at = [], -1
    try:
        while True:
            at = values.index(value, at + 1)
            found.append(at)
    except ValueError:
        return found
