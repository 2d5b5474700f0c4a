"""A tokenizer that needs no files, for benchmarks that do not read the text: its vocabulary is the 256 bytes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As transformers has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust)


def write_tokenizer(folder: Path) -> None:
    """The files of one."""
    byte_tokenizer().save_pretrained(folder)
