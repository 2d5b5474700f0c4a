"""Text one token at a time equals the text of all tokens at once."""

from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as RustTokenizer, decoders, models

from tests.how_many import num_examples
from transom_core.text.detokenizer import Detokenizer
from transom_core.text.tokenizer import Tokenizer

# SmolLM2's vocabulary has no token for some bytes (six control characters, most planes of Unicode without characters);
# its own tokenizer loses them as well.
SPELLED = st.characters(codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
TEXT = st.text(st.one_of(SPELLED, st.sampled_from("🦜👩‍👧日本語한é\u0301<|im_end|> \n0")), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151), st.just(60000)), max_size=60), skip=st.booleans()
)
@settings(max_examples=num_examples(100, 300), deadline=None)
def test_random_tokens(demo: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(pieces(demo, ids, skip=skip)) == demo.decode(ids, skip_special_tokens=skip)


@given(text=TEXT, skip=st.booleans())
@settings(max_examples=num_examples(100, 300), deadline=None)
def test_any_text_comes_back_and_never_shows_a_replacement(demo: Tokenizer, text: str, skip: bool) -> None:
    ids = demo.encode(text)
    got = pieces(demo, ids, skip=skip)
    assert "".join(got) == demo.decode(ids, skip_special_tokens=skip)
    if not skip:
        assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


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
