"""The library sees the same bytes for every token as our tokenizers give, for every kind of tokenizer."""

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from tests.core.grammar.vocabularies import allowed, tiny, tiny_vocabulary
from transom_core.grammar import GrammarMasks, GrammarVocabulary, compile_grammar
from transom_core.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    words = ["<unk>", "</s>", *BYTES, "▁", "a", "b", "▁a", '"', "▁{", "}"]
    rust = RustTokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    rust.decoder = decoder
    rust.add_tokens(["<tool_call>", "  "])
    rust.add_special_tokens([AddedToken("</s>", special=True), AddedToken("[CALL]", special=True)])
    return Tokenizer(rust, named_tokens={}, chat_template=None, eos_token_ids=(1,))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(),  # of which the library cannot tell how it writes a space
    ],
    ids=["replace", "metaspace"],
)
def test_sentencepiece_tokens_have_our_bytes(decoder: decoders.Decoder) -> None:
    tokenizer = sentencepiece(decoder)
    vocabulary = GrammarVocabulary(tokenizer, vocab_size=320, eos_token_ids=(1,))
    library = vocabulary.library_tokenizer
    assert library.vocab_size == 320
    # that is the library's mark
    known = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) != b"\xff"]
    assert [library.decode_bytes([i]) for i in known] == [tokenizer.token_bytes(i) for i in known]
    special = {tokenizer.token(i) for i in range(tokenizer.vocab_size) if library.is_special_token(i)}
    assert special == {"</s>", "<tool_call>", "[CALL]"}


def test_markers_are_never_text() -> None:
    """An added token of the form <...> is allowed only where the grammar names it, even if it is not declared as special."""
    tokenizer = sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
    marker = next(i for i, text in tokenizer.added_tokens.items() if text == "<tool_call>")
    vocabulary, masks = GrammarVocabulary(tokenizer, vocab_size=320, eos_token_ids=(1,)), GrammarMasks(320)
    text, call = (compile_grammar(g, vocabulary) for g in (r"start: /(.|\n)*/", r"start: /(.|\n)*/ <tool_call>"))
    masks.compute([text, call])
    assert marker not in allowed(masks, text)
    assert 1 in allowed(masks, text)
    assert marker in allowed(masks, call)
    assert 1 not in allowed(masks, call)


@pytest.mark.parametrize("vocab_size", [2048, 2051, 2304, 1900])
def test_logits_may_be_more_or_fewer_than_the_tokens(vocab_size: int) -> None:
    vocabulary, masks = tiny_vocabulary(vocab_size), GrammarMasks(vocab_size)
    matcher = compile_grammar(r"start: /(.|\n)*/", vocabulary)
    masks.compute([matcher])
    ids = allowed(masks, matcher)
    assert len(masks.plan_mask([(0, matcher)], 3)) == 3 * -(-vocab_size // 8)
    assert max(ids) < min(vocab_size, 2048)
    assert set(ids) >= {
        i for i in range(min(vocab_size, 2048)) if tiny().token_bytes(i).isascii() and not tiny().is_special(i)
    }


def test_every_end_of_text_is_allowed_where_an_answer_may_end() -> None:
    vocabulary = GrammarVocabulary(tiny(), vocab_size=2048, eos_token_ids=(2, 0, 5000))
    masks, matcher = GrammarMasks(2048), compile_grammar("start: /[0-9]+/", vocabulary)
    masks.compute([matcher])
    assert not {0, 2} & set(allowed(masks, matcher))
    matcher.consume(tiny().encode("7")[0])
    masks.compute([matcher])
    assert {0, 2} <= set(allowed(masks, matcher))
    assert matcher.may_end
    assert not matcher.is_complete
