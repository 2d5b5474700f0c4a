"""Text out of tokens, one at a time.

The state is at most three bytes of an unfinished character and follows from the token ids alone; so replaying a resumed
request's ids rebuilds it, and a token costs the same at any length.
"""

from __future__ import annotations

import codecs

from transom_worker.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One answer's text. Concatenated, what `push` and `flush` return is the answer decoded as a whole.

    For SentencePiece vocabularies the leading space is kept, since the answer goes on from a prompt. The prompt does not
    change the text: a character that it leaves unfinished is not completed by its answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Text that this token makes final; an unfinished character is held back, a broken one becomes U+FFFD."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end: U+FFFD if a character was left unfinished."""
        return self._decoder.decode(b"", final=True)
