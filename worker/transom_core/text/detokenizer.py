"""Turns output tokens into text, one token at a time.

A token may end in the middle of a UTF-8 character. The character's bytes are then held back until later tokens complete it. These
bytes, three at most, are the whole state. So replaying the token ids of a migrated request rebuilds the state, and the cost of a
token does not grow with the output. Most tokens begin and end between two characters: their text is decoded once per tokenizer.
"""

from encodings.utf_8 import IncrementalDecoder

from transom_core.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one output. The concatenated results of `push` and `flush` equal the output decoded as a whole.

    With a SentencePiece vocabulary, a leading space is kept, because the output continues a prompt. The prompt does not influence
    the text: if it ends inside a character, the output does not complete that character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = IncrementalDecoder("replace")
        self._whole_texts = tokenizer.whole_texts[skip_special_tokens]

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that it completes. An unfinished character is held back; a broken one becomes U+FFFD."""
        is_whole = not self._decoder.buffer
        if is_whole and (known := self._whole_texts.get(token_id)) is not None:
            return known
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        text: str = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if is_whole and not self._decoder.buffer:
            self._whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        """End the output. Return U+FFFD if a character is unfinished, otherwise ""."""
        return self._decoder.decode(b"", final=True)
