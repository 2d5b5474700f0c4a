"""Matchers hold walks to their grammars, and say why where they cannot."""

import json
import random

import pytest

from tests.core.grammar.hostile_schemas import LARGE, grammar
from tests.core.grammar.vocabularies import PERSON, allowed, tiny, tiny_vocabulary, walk
from tests.how_many import num_examples
from transom_core.errors import RequestError, StepFailed
from transom_core.grammar import MAX_GRAMMAR_BYTES, GrammarMasks, compile_grammar, masks


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
