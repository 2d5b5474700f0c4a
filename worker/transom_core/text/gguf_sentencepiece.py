"""Builds a tokenizer from a SentencePiece vocabulary in a GGUF file.

The file has the vocabulary's pieces and their scores. The `tokenizers` library needs byte pair encoding: a list of merges,
pairs of pieces that become one. The merges follow from the pieces: wherever a piece is two other pieces put together, that is a
merge, and those that make pieces with higher scores come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from transom_core.errors import ModelError
from transom_core.model_files.gguf_header import GgufHeader

_NORMAL = 1  # the token type of text; bytes, control tokens and others are never merged
_SPACE = "▁"


def sentencepiece(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    """Build the tokenizer of a file whose `tokenizer.ggml.model` is llama.

    Raises:
        ModelError: scores or token types are missing, or not as many as tokens.
    """
    scores, types = (header.require(f"tokenizer.ggml.{name}") for name in ("scores", "token_type"))
    if not len(tokens) == len(scores) == len(types):
        raise ModelError(f"{header.path} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} token types.")
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    rust = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores, types),
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        parts.append(decoders.Strip(content=" ", left=1))
    else:
        rust.normalizer = normalizers.Replace(" ", _SPACE)
    rust.decoder = decoders.Sequence(parts)
    return rust


def _merges(vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes another piece: the best piece first, then by the pair's lengths, as transformers orders
    them."""
    found = []
    for piece, i in vocabulary.items():
        if types[i] != _NORMAL:
            continue
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        made = [
            (vocabulary[left], vocabulary[right], left, right)
            for left, right in halves
            if left in vocabulary and right in vocabulary
        ]
        found += [(scores[i], len(left), len(right), left, right) for _, _, left, right in sorted(made)]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in found]
