"""Turns output tokens into text, one token at a time.

A token may end in the middle of a UTF-8 character: its bytes are held back until the next tokens complete the character. These
three bytes at most are the whole state, and they depend on the token ids alone. So the replay of a migrated request's ids
rebuilds the state, and a token costs the same at any length of the output.
"""

from __future__ import annotations

import codecs

from transom_core.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output. The concatenated results of `push` and `flush` equal the output decoded as a whole.

    With a SentencePiece vocabulary the leading space is kept, since the output continues a prompt. The prompt does not change
    the text: the output does not complete a character that the prompt leaves unfinished.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it completes. An unfinished character is held back, a broken one becomes U+FFFD."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the output; returns U+FFFD if a character is unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)
