"""Builds the tokenizer of a GGUF file from the vocabulary and the merges in its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transom_core.errors import ModelError
from transom_core.model_files.gguf_header import GgufHeader, read_gguf_header
from transom_core.text.gguf_sentencepiece import sentencepiece

_CONTROL, _USER_DEFINED = 3, 4  # types of added tokens: text is cut at these first
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# GPT-4's regular expression for words, as Llama 3 and Qwen use it. DIGITS stands for the number of digits that stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


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
    is_sentencepiece = header.require("tokenizer.ggml.model") == "llama"
    rust = sentencepiece(header, tokens) if is_sentencepiece else _byte_level(header, tokens)
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
        rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception where vocabulary and merges do not fit
        raise ModelError(f"{header.path} has a broken tokenizer: {error}.") from None
    rust.pre_tokenizer, rust.decoder = splits, decoders.ByteLevel()
    if name == "qwen2":
        rust.normalizer = normalizers.NFC()
    return rust


def _splits(header: GgufHeader) -> Any:
    """The pre-tokenizer, which cuts text before merging, by llama.cpp's name for it."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), by_bytes],
        "gpt-2": [by_bytes],
        "llama-bpe": _words("{1,3}"),
        "qwen2": _words(""),
    }
    kind, name = header.require("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in known:
        raise ModelError(
            f"{header.path} has tokenizer {kind!r} with pre-tokenizer {name!r}; supported in GGUF so far: 'llama', and 'gpt2' with "
            f"{' or '.join(map(repr, known))}. Give the model as a folder of safetensors with its tokenizer.json."
        )
    return pre_tokenizers.Sequence(known[name])


def _words(digits: str) -> list[Any]:
    pattern = Regex(_WORDS.replace("{DIGITS}", digits))
    return [
        pre_tokenizers.Split(pattern, behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
