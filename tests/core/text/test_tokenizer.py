"""Ids, text and chat prompts against transformers' own tokenizers on the same files, and on GGUF files with the same vocabulary."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from tests.gguf_files import finish
from tests.tiny_checkpoints import tiny_tokenizer
from transom_core.errors import ModelError, PromptTooLong, RequestError
from transom_core.model_files.resolve import resolve_model
from transom_core.text.gguf_tokenizer import read_gguf_vocabulary
from transom_core.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world",
    "  two  spaces\n\n\ttab\r\n",
    "In 2024 there were 1234567.89 of them, 50% more",
    "naïve café 日本語のテキスト 한국어 🦜👩‍👩‍👧 \u200d e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<file_sep>x<|endoftext|>",
    "def f(x):\n    return x ** 2  # ⁴²\n",
    "\x00\x7f\xa0\xad",
]
GGUF_TEXTS = [
    "",
    "The quick brown fox, isn't it?  Two  spaces and 12345 digits",
    " leading, trailing ",
    "line\n\nbreaks\r\n\tand tabs\n",
    "Ünïcödé \uff21\uff22 é 🦜 日本",
    "<bos> in text",
]
CORPUS = [Path(__file__).read_text("utf-8"), gguf.__doc__ or "", "the cat sat on the mat " * 20]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize("text", TEXTS)
def test_the_folder_encodes_as_transformers(folder: Path, tiny: Tokenizer, text: str) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    ids = oracle(text)["input_ids"]
    assert tiny.encode(text) == ids
    assert tiny.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tiny.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text


def test_smollm2_splits_every_digit_and_adds_no_bos(demo: Tokenizer) -> None:
    assert [demo.token(i) for i in demo.encode("In 1234")] == ["In", " ", "1", "2", "3", "4"]
    assert demo.encode("<|im_end|>") == [2]
    assert (demo.vocab_size, demo.eos_token_ids) == (49152, (2,))


def test_half_a_surrogate_pair_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        demo.encode("a\ud83d")
    with pytest.raises(RequestError, match="surrogate"):
        demo.apply_chat_template([{"role": "user", "content": "a\ud83d"}])


def test_a_token_as_log_probabilities_show_it(demo: Tokenizer) -> None:
    parts = demo.encode("🦜")
    assert b"".join(demo.token_bytes(i) for i in parts) == "🦜".encode()
    assert all(demo.token(i).startswith("\\x") for i in parts)
    assert demo.token(2) == "<|im_end|>"
    assert demo.is_special(2)
    for beyond in (demo.vocab_size, 10**12, -1):
        assert demo.token(beyond) == demo.decode([beyond]) == ""


def test_a_length_is_refused_before_there_are_ids(demo: Tokenizer) -> None:
    def refuse(num_tokens: int, *, at_least: bool = False) -> None:
        if at_least:
            return
        raise PromptTooLong(f"{num_tokens} tokens")

    assert demo.longest_token_bytes  # which reads the vocabulary once
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLong, match="100001 tokens"):
            demo.encode("a " * 100_000, check_length=refuse)
        assert tracemalloc.get_traced_memory()[1] < 400_000  # the list of ids alone would take 800,000 bytes
    finally:
        tracemalloc.stop()


def test_a_text_is_refused_before_it_is_encoded(demo: Tokenizer) -> None:
    """Encoding takes up to 140 times the memory of the text, so its length has to say that it cannot fit."""
    calls = []

    def refuse(num_tokens: int, *, at_least: bool = False) -> None:
        calls.append(at_least)
        raise PromptTooLong(f"{num_tokens} tokens")

    assert demo.longest_token_bytes is not None
    for text in ("a " * 100_000, "\u1700" * 70_000, "<|im_end|>" * 20_000, " " * 200_000):
        least = -(-len(text.encode()) // demo.longest_token_bytes)
        assert least <= len(demo.encode(text))
        with pytest.raises(PromptTooLong, match=f"^{least} tokens"):
            demo.encode(text, check_length=refuse)
    assert calls == [True] * 4


def test_ends_of_text_come_from_both_configs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert Tokenizer.load(resolve_model(str(tmp_path))).eos_token_ids == (0, 7, 2)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [("tokenizer.json", None, "is missing"), ("tokenizer.json", "{", "cannot be read"), ("config.json", "[]", "list")],
)
def test_broken_files_are_named(folder: Path, tmp_path: Path, file: str, text: str | None, match: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(ModelError, match=match) as caught:
        Tokenizer.load(resolve_model(str(tmp_path)))
    assert file in str(caught.value)


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
    return finish(writer, path)


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
    for text in GGUF_TEXTS:
        want = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == want, text
        assert ours.decode(want, skip_special_tokens=False) == oracle.backend_tokenizer.decode(
            want, skip_special_tokens=False
        )
    assert ours.encode("x").ids[0] == 2


def test_added_runs_of_spaces_are_spaces() -> None:
    """As in Gemma's files."""
    vocabulary, merges = pieces()
    oracle = GemmaTokenizer(vocab=vocabulary, merges=merges, eos_token="<eos>")
    rust = oracle.backend_tokenizer
    rust.add_tokens([AddedToken("▁" * 4, normalized=False, special=False)])
    ours = Tokenizer(rust, named_tokens={}, chat_template=None, eos_token_ids=())
    ids = [rust.token_to_id(token) for token in ("▁" * 4, "x", "▁" * 4)]
    assert b"".join(map(ours.token_bytes, ids)).decode() == rust.decode(ids) == "    x    "


def test_qwens_words(tmp_path: Path) -> None:
    tiny = tiny_tokenizer()
    model = json.loads(tiny.backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(merge) for merge in model["merges"]]
    path = write(tmp_path / "v.gguf", "gpt2", tokens, [1] * len(tokens), merges=merges, pre="qwen2")
    oracle = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge) for merge in model["merges"]])
    ours = read_gguf_vocabulary(path).rust
    for text in GGUF_TEXTS:
        assert ours.encode(text).ids == oracle(text)["input_ids"], text
    assert isinstance(ours.decoder, decoders.ByteLevel)


@pytest.mark.parametrize(
    ("pre", "cut", "tokens"),
    [
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "45", "ĠaB", "/Ċ"], ["123", "4", "5"]),
        ("gpt-4o", ["I'll", "Ġpay", "Ġ", "123", "45", "Ġa", "B", "/Ċ"], ["1", "2", "3", "4", "5"]),
        ("tekken", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Ġa", "B", "/Ċ"], ["1", "2", "3", "4", "5"]),
        ("command-r", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "ĠaB", "/", "Ċ"], ["1", "2", "3", "4", "5"]),
    ],
)
def test_words_of_other_families(tmp_path: Path, pre: str, cut: list[str], tokens: list[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    path = write(tmp_path / "v.gguf", "gpt2", [*alphabet, "123"], [1] * 257, merges=[], pre=pre)
    rust = read_gguf_vocabulary(path).rust
    assert [text for text, _ in rust.pre_tokenizer.pre_tokenize_str("I'll pay 12345 aB/\n")] == cut
    assert rust.encode("12345").tokens == tokens


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_other_kinds_are_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=f"has tokenizer '{kind}'"):
        read_gguf_vocabulary(write(tmp_path / "v.gguf", kind, ["a"], [1]))


def test_scores_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", "llama", ["a", "b"], [1, 1], scores=[0.0])
    with pytest.raises(ModelError, match="2 tokens, 1 scores"):
        read_gguf_vocabulary(path)
