"""Ids, text and chat prompts against transformers' own tokenizers on the same files."""

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from transom_core.errors import ModelError, PromptTooLong, RequestError
from transom_core.model_files.resolve import resolve_model
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
