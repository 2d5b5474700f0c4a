"""`GrammarVocabulary`: the model's tokens as bytes, for the grammar library."""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from transom_core.text.tokenizer import Tokenizer

_MARK = b"\xff"


class GrammarVocabulary:
    """The tokens of one model. The constructor takes about 10 us per token.

    A token is *special* if the tokenizer says so, or if it is an added token whose text has the form `<...>`: many models have
    such markers that are not declared as special. A grammar allows a special token only where it names it, never as text.

    The vocabulary has as many tokens as the model has logits. Ids that the tokenizer does not know have no bytes, and no
    grammar allows them; tokens beyond the logits are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the number of logits, `eos_token_ids` are all ids that end an answer."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted({i for i in eos_token_ids if 0 <= i < vocab_size}))
        tokens = _Tokens(tokenizer, vocab_size, self.eos_token_ids)
        self.library_tokenizer = _from_json(tokenizer, tokens) or LLTokenizer(
            TokenizerWrapper(tokens), eos_token=tokens.eos_token_ids
        )


class _Tokens:
    """The attributes and the call that `llguidance.TokenizerWrapper` needs of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        # The library requires an end-of-text token. For a model without one, token 0 is given; it is then allowed where an
        # answer may end.
        self.eos_token_ids = list(eos_token_ids) or [0]
        self.eos_token_id = self.eos_token_ids[0]
        # The library marks special tokens with the byte 0xFF, which no text in UTF-8 has; tokens with it are in no answer.
        self.tokens = [b"" if _MARK in text else text for text in map(tokenizer.token_bytes, range(vocab_size))]
        markers = {i for i, text in tokenizer.added_tokens.items() if text.startswith("<") and text.endswith(">")}
        self.special_token_ids = [
            i for i, text in enumerate(self.tokens) if text and (i in markers or tokenizer.is_special(i))
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _from_json(tokenizer: Tokenizer, tokens: _Tokens) -> LLTokenizer | None:
    """Return the library's own version of the tokenizer, which tokenises text that a grammar demands without the GIL.

    Return None if that version has other bytes for a token than this tokenizer, as it has for some SentencePiece vocabularies.
    """
    num_known = tokenizer.vocab_size
    if num_known > len(tokens.tokens) or not all(tokenizer.token_bytes(i) for i in range(num_known)):
        return None
    try:
        library = LLTokenizer(tokenizer.to_json(), n_vocab=len(tokens.tokens), eos_token=tokens.eos_token_ids)
    except ValueError:
        return None
    special_ids = set(tokens.special_token_ids)
    for i, text in enumerate(tokens.tokens):
        is_marked = not text and i < num_known
        if (not is_marked and library.decode_bytes([i]) != text) or library.is_special_token(i) != (i in special_ids):
            return None
    return library
