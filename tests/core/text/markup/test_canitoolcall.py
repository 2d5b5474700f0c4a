"""The fixtures of `canitoolcall`, family by family; see `canitoolcall_fixtures`."""

import json

import pytest
from canitoolcall.fixtures import Fixture
from canitoolcall.results import Status

from tests.core.text.markup.canitoolcall_fixtures import (
    MARKER_STYLES,
    FixtureTokenizer,
    MarkerStyle,
    all_fixtures,
    families,
    fixture_context,
    parse_result,
    parsers_of,
    read_answer,
    run_fixture,
)
from transom_core.text.markup.formats import answer_format

# Where our rule is another than the fixture's, and why.
_OTHER_RULES = {
    # It wants no call, as the list of calls is not closed. The first call of the list is complete: it is kept, as for all
    # families, and as the other fixtures with a second call that is cut want it.
    "llama/l4-truncated-missing-close-bracket": ["get_weather"]
}
# Markers' texts that the model wrote with ordinary tokens, which only its token ids tell.
_ORDINARY_TEXTS = {
    "gpt-oss/harmony-marker-in-reasoning": "I must not write <|call|> or <|channel|>final myself",
    "gpt-oss/harmony-marker-in-arguments": (
        "A call ends with <|call|>; a turn with <|return|>.\\nHeader: <|start|>assistant<|channel|>commentary "
        "to=functions.get_time <|constrain|>json<|message|>{}<|end|>"
    ),
}
_FIRST_SPECIAL_ID = 199_998
_FIXTURES = [
    fixture for fixture in all_fixtures() if parsers_of(fixture) and fixture.id not in (_OTHER_RULES | _ORDINARY_TEXTS)
]


@pytest.mark.parametrize("style", MARKER_STYLES)
@pytest.mark.parametrize("fixture", _FIXTURES, ids=lambda fixture: fixture.id)
def test_fixture(fixture: Fixture, style: MarkerStyle) -> None:
    parsers = parsers_of(fixture)
    assert parsers is not None
    status, failed = run_fixture(answer_format(*parsers), fixture, style=style)
    assert status in (Status.PASS, Status.SOFT_PASS), "\n".join(failed)


@pytest.mark.parametrize("name", _OTHER_RULES)
def test_a_fixture_with_another_rule(name: str) -> None:
    (fixture,) = [fixture for fixture in all_fixtures() if fixture.id == name]
    parsers = parsers_of(fixture)
    assert parsers is not None
    parser = answer_format(*parsers).parser(FixtureTokenizer(()), fixture_context(fixture))
    result = parse_result(read_answer(parser, [(1, fixture.raw_output)]))
    assert [call.name for call in result.tool_calls] == _OTHER_RULES[name]


@pytest.mark.parametrize("name", _ORDINARY_TEXTS)
def test_text_of_markers_in_ordinary_tokens_is_text(name: str) -> None:
    (fixture,) = [fixture for fixture in all_fixtures() if fixture.id == name]
    parsers = parsers_of(fixture)
    assert parsers is not None
    tokenizer = FixtureTokenizer(families()[fixture.family].markers)
    before, ordinary, after = fixture.raw_output.partition(_ORDINARY_TEXTS[name])
    tokens = tokenizer.cut(before, shows_special=False) + FixtureTokenizer(()).cut(ordinary, shows_special=False)
    tokens += tokenizer.cut(after, shows_special=False)
    assert ordinary
    assert sum(map(tokenizer.is_special, [i for i, _ in tokens])) == sum(
        i >= _FIRST_SPECIAL_ID for i in fixture.output_token_ids or ()
    )
    result = parse_result(read_answer(answer_format(*parsers).parser(tokenizer, fixture_context(fixture)), tokens))
    assert fixture.expected is not None
    assert result.reasoning_content == fixture.expected.reasoning_content
    assert [json.loads(call.arguments_raw or "") for call in result.tool_calls] == [
        call.arguments for call in fixture.expected.tool_calls
    ]
