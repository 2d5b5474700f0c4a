"""Vocabularies of the tests' tokenizers, and walks through grammars without a model."""

import json
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tests.tiny_checkpoints import tiny_tokenizer
from transom_core.grammar import GrammarMasks, GrammarMatcher, GrammarVocabulary
from transom_core.text.tokenizer import Tokenizer

_RANDOM = random.Random(0)


@lru_cache(maxsize=1)
def tiny() -> Tokenizer:
    """SmolLM2's tokenizer, cut to 2,048 tokens; id 2 ends a text."""
    return Tokenizer(tiny_tokenizer().backend_tokenizer, named_tokens={}, chat_template=None, eos_token_ids=(2,))


@lru_cache(maxsize=4)
def tiny_vocabulary(vocab_size: int = 2048) -> GrammarVocabulary:
    return GrammarVocabulary(tiny(), vocab_size=vocab_size, eos_token_ids=(2,))


def json_grammar(schema: Any) -> str:
    """A grammar of compact JSON, which noise ends in few tokens."""
    return "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})


_FIELDS = {
    "name": {"type": "string", "maxLength": 8},
    "age": {"type": "integer", "minimum": 0, "maximum": 99},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
}
PERSON = json_grammar(
    {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}
)


def allowed(masks: GrammarMasks, matcher: GrammarMatcher) -> list[int]:
    """The token ids that the row of a matcher allows."""
    row = np.frombuffer(masks.plan_mask([(0, matcher)], 1), np.uint8)
    return np.flatnonzero(np.unpackbits(row, bitorder="little", count=matcher.vocabulary.vocab_size)).tolist()


def walk(matcher: GrammarMatcher, num_tokens: int, choose: Callable[[list[int]], int] = _RANDOM.choice) -> list[int]:
    """Consume tokens that the masks allow, up to the answer's end; returns them."""
    masks, tokens = GrammarMasks(matcher.vocabulary.vocab_size), []
    while not matcher.is_complete and len(tokens) < num_tokens:
        masks.compute([matcher])
        assert not matcher.has_failed
        tokens.append(choose(allowed(masks, matcher)))
        if tokens[-1] in matcher.vocabulary.eos_token_ids:
            break
        matcher.consume(tokens[-1])
    return tokens
