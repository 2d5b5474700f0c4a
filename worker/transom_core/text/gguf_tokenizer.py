"""Builds the tokenizer of a GGUF file from the vocabulary in its metadata.

The `tokenizers` library takes byte pair encoding: a list of merges, each a pair of pieces that become one piece. A byte-level
vocabulary comes with its merges. A SentencePiece vocabulary has pieces with scores, and the merges are derived from them: two
pieces whose concatenation is a piece too are a merge, and merges that make pieces with higher scores come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transom_core.errors import ModelError
from transom_core.model_files.gguf_header import GgufHeader, read_gguf_header
from transom_core.text.ranked_tokenizers import BREAKS, SUFFIXES, cased_words, split_by

_NORMAL = 1  # the token type of ordinary text; tokens of other types (bytes, control tokens ...) are never merged
_SPACE = "▁"
_CONTROL, _USER_DEFINED = 3, 4  # the token types of added tokens, at which text is split before anything else
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# GPT-4's regular expression for words, as Llama 3 and Qwen use it. DIGITS stands for a quantifier: how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT_4O = rf"{cased_words(SUFFIXES)}|\p{{N}}{{1,3}}|{_MARKS}|{BREAKS}"
_TEKKEN = rf"{cased_words()}|\p{{N}}|{_MARKS}|{BREAKS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """A tokenizer, the texts of its named tokens (bos_token, ...), and its chat template, if it has one."""

    rust: Tokenizer
    named_tokens: dict[str, str]
    chat_template: str | None


def read_gguf_vocabulary(path: Path) -> GgufVocabulary:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelError: the vocabulary is broken, or of a kind that is not supported.
    """
    header = read_gguf_header(path)
    tokens = header.require("tokenizer.ggml.tokens")
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    return GgufVocabulary(
        rust=_build(header, tokens),
        named_tokens={name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)},
        chat_template=header.metadata.get("tokenizer.chat_template"),
    )


def _build(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    """Build the tokenizer with its added tokens; if the file says so, it puts the bos token before each text."""
    is_sentencepiece = header.require("tokenizer.ggml.model") == "llama"
    rust = _sentencepiece(header, tokens) if is_sentencepiece else _byte_level(header, tokens)
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    rust.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    if header.metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece) and bos is not None:
        special = (tokens[bos], bos)
        rust.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[special])
    return rust


def _byte_level(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    splits = _splits(header)
    name = header.metadata["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in header.metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in ("llama-bpe", "tekken")))
    except Exception as error:  # the library raises bare Exception if vocabulary and merges do not match
        raise ModelError(f"{header.path} has a broken tokenizer: {error}.") from None
    rust.pre_tokenizer, rust.decoder = splits, decoders.ByteLevel()
    if name == "qwen2":
        rust.normalizer = normalizers.NFC()
    return rust


def _splits(header: GgufHeader) -> Any:
    """Return the pre-tokenizer, which splits text before merging; the file has llama.cpp's name for it."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    by_digits = [pre_tokenizers.Digits(individual_digits=True), by_bytes]
    known: dict[str, list[Any]] = {
        **{"smollm": by_digits, "command-r": by_digits, "gpt-2": [by_bytes]},
        **{name: split_by(_WORDS.replace("{DIGITS}", "{1,3}")) for name in ("llama-bpe", "dbrx")},
        "qwen2": split_by(_WORDS.replace("{DIGITS}", "")),
        **{"gpt-4o": split_by(_GPT_4O), "llama4": split_by(_GPT_4O), "tekken": split_by(_TEKKEN)},
    }
    kind, name = header.require("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in known:
        raise ModelError(
            f"{header.path} has tokenizer {kind!r} with pre-tokenizer {name!r}; supported in GGUF so far: 'llama', and 'gpt2' with "
            f"{' or '.join(map(repr, known))}. Give the model as a folder of safetensors with its tokenizer.json."
        )
    return pre_tokenizers.Sequence(known[name])


def _sentencepiece(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    """Build the tokenizer of a file whose `tokenizer.ggml.model` is llama.

    Raises:
        ModelError: scores or token types are missing, or their numbers differ from the tokens'.
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
    """Return every pair of pieces that makes another piece, in transformers' order: highest score first, then the longer halves."""
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
