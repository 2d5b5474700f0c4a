"""Text one token at a time equals the text of all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from transom_core.model_files.resolve import resolve_model
from transom_core.text.detokenizer import Detokenizer
from transom_core.text.tokenizer import Tokenizer

# without what SmolLM2's vocabulary cannot spell (see test_tokenizer.py)
SPELLED = st.characters(codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
TEXT = st.text(st.one_of(SPELLED, st.sampled_from("🦜👩‍👧日本語한é\u0301<|im_end|> \n0")), max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("smollm2"))


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151), st.just(60000)), max_size=60), skip=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_random_tokens(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=TEXT, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_real_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    got = pieces(tokenizer, ids, skip=skip)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(text=TEXT, cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_a_replay_rebuilds_the_state(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text)
    whole = pieces(tokenizer, ids, skip=True)
    again = Detokenizer(tokenizer, skip_special_tokens=True)
    for token_id in ids[:cut]:
        again.push(token_id)
    assert [*(again.push(i) for i in ids[cut:]), again.flush()] == whole[min(cut, len(ids)) :]


def test_an_unfinished_character_is_held_back_until_the_end(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("🦜")
    assert rest
    assert pieces(tokenizer, [first], skip=True) == ["", "\ufffd"]
    assert pieces(tokenizer, [first, *rest], skip=True) == ["", *[""] * (len(rest) - 1), "🦜", ""]


def test_sentencepiece_vocabularies_keep_the_leading_space() -> None:
    words = ["<unk>", "</s>", "▁Hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    rust = RustTokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(rust, named_tokens={"eos_token": "</s>"}, chat_template=None, eos_token_ids=())
    parrot = [words.index(f"<0x{byte:02X}>") for byte in "🦜".encode()]
    ids = [2, 3, *parrot, 1]
    assert pieces(tokenizer, ids, skip=True) == [" Hello", " world", "", "", "", "🦜", "", ""]
    assert tokenizer.decode(ids) == "Hello world🦜"
    assert tokenizer.eos_token_ids == (1,)
