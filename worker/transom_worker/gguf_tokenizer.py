"""The tokenizer that a GGUF file carries: its vocabulary and merges as a Rust tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from transom_worker.errors import ModelError
from transom_worker.gguf_header import GgufHeader, read_gguf_header

_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched before any splitting
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """A tokenizer with the texts of its named tokens (bos_token, ...) and its chat template, if it has one."""

    rust: Tokenizer
    named_tokens: dict[str, str]
    chat_template: str | None


def read_gguf_vocabulary(path: Path) -> GgufVocabulary:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelError: broken, or of a kind that is not supported.
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
    splits = _splits(header)
    rust = _bpe(header, tokens)
    rust.pre_tokenizer = splits
    rust.decoder = decoders.ByteLevel()
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    rust.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    if header.metadata.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        special = (tokens[bos], bos)
        rust.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[special])
    return rust


def _bpe(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in header.metadata.get("tokenizer.ggml.merges", [])]
    try:
        return Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises bare Exception for whatever does not fit together
        raise ModelError(f"{header.path} has a broken tokenizer: {error}.") from None


def _splits(header: GgufHeader) -> Any:
    """How text is cut before merging, by llama.cpp's name for it."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), by_bytes],
        "gpt-2": [by_bytes],
    }
    kind, name = header.require("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in known:
        raise ModelError(
            f"{header.path} has tokenizer {kind!r} with pre-tokenizer {name!r}; supported in GGUF so far: 'gpt2' with "
            f"{' or '.join(map(repr, known))}. Give the model as a folder of safetensors with its tokenizer.json."
        )
    return pre_tokenizers.Sequence(known[name])
