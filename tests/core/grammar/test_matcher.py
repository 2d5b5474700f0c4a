"""Matchers hold walks to their grammars, and say why where they cannot. The library sees the same bytes for every token as our
tokenizers give, for every kind of tokenizer."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models

from tests.core.grammar.hostile_schemas import LARGE, grammar
from tests.core.grammar.vocabularies import PERSON, allowed, tiny, tiny_vocabulary, walk
from tests.how_many import num_examples
from transom_core.errors import RequestError, StepFailed
from transom_core.grammar import MAX_GRAMMAR_BYTES, GrammarMasks, GrammarVocabulary, compile_grammar, masks
from transom_core.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def test_a_copy_goes_on_alone_and_a_replayed_matcher_allows_the_same() -> None:
    prototype, masks = compile_grammar(PERSON, tiny_vocabulary()), GrammarMasks(2048)
    tokens = walk(prototype.copy(), 60)
    moving = prototype.copy()
    for n, token in enumerate(tokens):
        replayed = prototype.copy()
        replayed.replay(tokens[:n])
        masks.compute([moving, replayed])
        assert allowed(masks, moving) == allowed(masks, replayed)
        masks.remove(replayed)
        if token not in moving.vocabulary.eos_token_ids:
            moving.consume(token)
    assert len(masks) == 1


def test_a_token_that_the_grammar_does_not_allow_is_an_error() -> None:
    matcher = compile_grammar(PERSON, tiny_vocabulary())
    with pytest.raises(StepFailed, match="which the grammar of the answer does not allow"):
        matcher.consume(tiny().encode("[")[0])
    assert matcher.has_failed
    assert not matcher.is_complete
    with pytest.raises(RequestError, match="Token 1 of resumed_output_ids") as caught:
        compile_grammar(PERSON, tiny_vocabulary()).replay([*tiny().encode("{"), *tiny().encode("[")])
    assert caught.value.param == "resumed_output_ids"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: %json " + json.dumps({"not": {}}), 'JSON Schema\'s "not" is not supported'),
        ("start: %json " + json.dumps({"if": {}, "then": {}}), 'JSON Schema\'s "if", "then" is not supported'),
        ("start: %json " + json.dumps({"type": "string", "format": "colour"}), "Unknown format: colour"),
        ("start: %json " + json.dumps({"type": "tuple"}), "Invalid type: tuple"),
        ("start: %json " + json.dumps({"$ref": "#"}), "it allows no answer"),
        ("start: %json " + json.dumps({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        ("start: /(?=a)b/", "look-around"),
        ("start: other", 'unknown name: "other"'),
        ("start: <|nothing|>", "unknown special token"),
        ("no grammar", "Expected token"),
        ("start: " + '"a" ' * MAX_GRAMMAR_BYTES, "and 1048576 are allowed"),
        ('start: "\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(RequestError, match="The grammar of the answer cannot be used: ") as caught:
        compile_grammar(text, tiny_vocabulary())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("inline_s", [0.0, 1.0])
def test_masks_of_many_matchers_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch, inline_s: float) -> None:
    """On several threads, and on one."""
    monkeypatch.setattr(masks, "INLINE_S", inline_s)
    together, alone = GrammarMasks(2048, num_threads=2), GrammarMasks(2048, num_threads=1)
    texts = ["start: /[a-z]+/", PERSON, r"start: /(.|\n)*/ <|im_end|>"]
    matchers = [compile_grammar(text, tiny_vocabulary()) for text in texts for _ in range(9)]
    for _ in range(2):  # from the second time on it is known what a mask takes
        together.compute(matchers)
    assert (together._executor is not None) == (inline_s == 0.0)
    for matcher in matchers:
        alone.compute([matcher])
        assert allowed(alone, matcher) == allowed(together, matcher)
        alone.remove(matcher)
    assert (together.num_computed, len(together), len(alone)) == (54, 27, 0)
    mask = together.plan_mask([(2, matchers[0])], 4)
    assert mask[: 2 * 256] == mask[3 * 256 :] * 2 == b"\xff" * 512


def test_a_row_may_lose_tokens() -> None:
    masks, matcher = GrammarMasks(2048), compile_grammar('start: "7" | "8"', tiny_vocabulary())
    masks.compute([matcher])
    seven, eight = allowed(masks, matcher)
    assert masks.forbid(matcher, [seven])
    assert allowed(masks, matcher) == [eight]
    assert not masks.forbid(matcher, [eight])


@pytest.mark.parametrize("name", LARGE)
def test_masks_of_large_schemas_are_bounded(name: str) -> None:
    """Answers to what compiles go on, or end by an error that says so; a walk never meets an empty mask without one."""
    matcher = compile_grammar(grammar(LARGE[name]), tiny_vocabulary())
    masks, random_of = GrammarMasks(2048), random.Random(3)
    for _ in range(num_examples(20, 60)):
        masks.compute([matcher])
        if matcher.has_failed:
            break
        assert masks.has_tokens(matcher)
        try:
            matcher.consume(random_of.choice(allowed(masks, matcher)))
        except RequestError:
            break
        if matcher.is_complete:
            return
    if matcher.has_failed:
        assert name in ("nested repetition", "2,000 properties")
        assert "too complex" in str(matcher.failure())


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
    library = GrammarVocabulary(tokenizer, vocab_size=320, eos_token_ids=(1,)).library_tokenizer
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
