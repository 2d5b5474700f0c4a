"""Tokenizers in GGUF files encode as transformers' classes of the same vocabulary do."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from tests.tiny_checkpoints import tiny_tokenizer
from transom_core.errors import ModelError
from transom_core.text.gguf_tokenizer import read_gguf_vocabulary

TEXTS = [
    "",
    "The quick brown fox, isn't it?  Two  spaces and 12345 digits",
    " leading, trailing ",
    "line\n\nbreaks\r\n\tand tabs\n",
    "Ünïcödé \uff21\uff22 é 🦜 日本",
    "<bos> in text",
]
CORPUS = [Path(__file__).read_text("utf-8"), gguf.__doc__ or "", "the cat sat on the mat " * 20]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write(path: Path, kind: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "scores" in more:
        writer.add_token_scores(more["scores"])
    if "merges" in more:
        writer.add_token_merges(more["merges"])
        writer.add_tokenizer_pre(more["pre"])
    for name in ("bos", "unk"):
        if name in more:
            getattr(writer, f"add_{name}_token_id")(more[name])
    if "space" in more:
        writer.add_add_space_prefix(more["space"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small vocabulary of SentencePiece's kind, learned from this file, and its merges."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES]
    rust.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    vocabulary = rust.get_vocab()
    merges = [tuple(merge) for merge in json.loads(rust.to_str())["model"]["merges"]]
    return vocabulary, merges


@pytest.mark.parametrize("space", [False, True])
def test_sentencepiece_is_gemmas_and_llamas(tmp_path: Path, space: bool) -> None:
    vocabulary, merges = pieces()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if i < 3 else 2 if i == 3 else 6 if token in BYTES else 1 for i, token in enumerate(tokens)]
    scores = [-float(i) for i in range(len(tokens))]
    path = write(tmp_path / "v.gguf", "llama", tokens, types, scores=scores, bos=2, unk=3, space=space)
    ours = read_gguf_vocabulary(path).rust
    oracle = (LlamaTokenizer if space else GemmaTokenizer)(
        vocab=vocabulary, merges=merges, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    for text in TEXTS:
        want = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == want, text
        assert ours.decode(want, skip_special_tokens=False) == oracle.backend_tokenizer.decode(
            want, skip_special_tokens=False
        )
    assert ours.encode("x").ids[0] == 2


def test_qwens_words(tmp_path: Path) -> None:
    tiny = tiny_tokenizer()
    model = json.loads(tiny.backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(merge) for merge in model["merges"]]
    path = write(tmp_path / "v.gguf", "gpt2", tokens, [1] * len(tokens), merges=merges, pre="qwen2")
    oracle = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge) for merge in model["merges"]])
    ours = read_gguf_vocabulary(path).rust
    for text in TEXTS:
        assert ours.encode(text).ids == oracle(text)["input_ids"], text
    assert isinstance(ours.decoder, decoders.ByteLevel)


def test_llama_3_keeps_three_digits_together(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    path = write(tmp_path / "v.gguf", "gpt2", [*alphabet, "123"], [1] * 257, merges=[], pre="llama-bpe")
    rust = read_gguf_vocabulary(path).rust
    cut = [text for text, _ in rust.pre_tokenizer.pre_tokenize_str("I'll pay 12345 now")]
    assert cut == ["I", "'ll", "Ġpay", "Ġ", "123", "45", "Ġnow"]
    assert rust.encode("12345").tokens == ["123", "4", "5"]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_other_kinds_are_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=f"has tokenizer '{kind}'"):
        read_gguf_vocabulary(write(tmp_path / "v.gguf", kind, ["a"], [1]))


def test_scores_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", "llama", ["a", "b"], [1, 1], scores=[0.0])
    with pytest.raises(ModelError, match="2 tokens, 1 scores"):
        read_gguf_vocabulary(path)
