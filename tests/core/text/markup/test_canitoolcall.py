"""The fixtures of `canitoolcall`, family by family (see `canitoolcall_fixtures`); and which parsers a model gets."""

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
from tests.present import present
from transom_core.text.markup.detection import detect
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
_HERMES = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'


@pytest.mark.parametrize("style", MARKER_STYLES)
@pytest.mark.parametrize("fixture", _FIXTURES, ids=lambda fixture: fixture.id)
def test_fixture(fixture: Fixture, style: MarkerStyle) -> None:
    parsers = present(parsers_of(fixture))
    status, failed = run_fixture(answer_format(*parsers), fixture, style=style)
    assert status in (Status.PASS, Status.SOFT_PASS), "\n".join(failed)


@pytest.mark.parametrize("name", _OTHER_RULES)
def test_a_fixture_with_another_rule(name: str) -> None:
    (fixture,) = [fixture for fixture in all_fixtures() if fixture.id == name]
    parsers = present(parsers_of(fixture))
    parser = answer_format(*parsers).parser(FixtureTokenizer(()), fixture_context(fixture))
    result = parse_result(read_answer(parser, [(1, fixture.raw_output)]))
    assert [call.name for call in result.tool_calls] == _OTHER_RULES[name]


@pytest.mark.parametrize("name", _ORDINARY_TEXTS)
def test_text_of_markers_in_ordinary_tokens_is_text(name: str) -> None:
    (fixture,) = [fixture for fixture in all_fixtures() if fixture.id == name]
    parsers = present(parsers_of(fixture))
    tokenizer = FixtureTokenizer(families()[fixture.family].markers)
    before, ordinary, after = fixture.raw_output.partition(_ORDINARY_TEXTS[name])
    tokens = tokenizer.cut(before, shows_special=False) + FixtureTokenizer(()).cut(ordinary, shows_special=False)
    tokens += tokenizer.cut(after, shows_special=False)
    assert ordinary
    assert sum(map(tokenizer.is_special, [i for i, _ in tokens])) == sum(
        i >= _FIRST_SPECIAL_ID for i in fixture.output_token_ids or ()
    )
    result = parse_result(read_answer(answer_format(*parsers).parser(tokenizer, fixture_context(fixture)), tokens))
    expected, arguments = present(fixture.expected), [call.arguments_raw or "" for call in result.tool_calls]
    assert result.reasoning_content == expected.reasoning_content
    assert [json.loads(one) for one in arguments] == [call.arguments for call in expected.tool_calls]


@pytest.mark.parametrize(
    ("model_type", "template", "parsers"),
    [
        ("qwen2", _HERMES, ("hermes", None)),
        ("smollm3", _HERMES.replace('"', '\\"'), ("hermes", None)),
        ("qwen3", _HERMES + "{{- '<think>\\n\\n</think>\\n\\n' }}", ("hermes", "qwen3")),
        ("qwen3_moe", "<tool_call>\\n<function=' + tool_call.name + '>\\n", ("qwen3_coder", None)),
        ("qwen3_5", "<think> <tool_call>\\n<function=example_function_name>\\n", ("qwen3_coder", "qwen3")),
        ("llama", "<|start_header_id|> {{- '\"parameters\": ' }} <|python_tag|>", ("llama3_json", None)),
        ("llama4", "<|header_start|>", ("llama4_pythonic", None)),
        ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS]", ("mistral", None)),
        ("mistral3", "[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("granite", "<|start_of_role|>assistant<|tool_call|>", ("granite", None)),
        ("gpt_oss", "<|channel|>analysis", ("openai", "openai_gptoss")),
        ("gemma4", "<|channel>thought <|tool_call>call:", ("gemma4", "gemma4")),
        ("kimi_k2", "<|tool_calls_section_begin|>", ("kimi_k2", None)),
        ("kimi_k2", "<think></think> <|tool_calls_section_begin|>", ("kimi_k2", "kimi_k2")),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> \\n```json", ("deepseek_v3", None)),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> </think>", ("deepseek_v31", "deepseek_v3")),
        ("deepseek_v32", '{% set dsml = "｜DSML｜" %}<{{ dsml }}function_calls>', ("deepseek_v32", "deepseek_v4")),
        ("minimax_m2", "<minimax:tool_call> <think>", ("minimax_m2", "qwen3")),
        ("seed_oss", "<seed:tool_call>\n<function= <seed:think>", ("seed_oss", "seed_oss")),
        ("lfm2_moe", "<|tool_list_start|> <think>", ("lfm2", "qwen3")),
        ("nemotron_h", '<TOOLCALL>[{"name": <think>', ("nemotron_json", "qwen3")),
        ("jamba", "<tool_definitions> <tool_calls>[", ("jamba", None)),
        ("cohere2", "<|START_THINKING|> <|START_ACTION|>[ <|START_RESPONSE|>", ("cohere_command3", "cohere_command3")),
        ("olmo3", "<functions> <function_calls>", ("olmo3", None)),
        ("deepseek_v41", "<｜DSML｜ calls>", ("deepseek_v41", "deepseek_v4")),
        ("glm4_moe", "<think> <tool_call> <arg_key>{{ k }}</arg_key>\n<arg_value>", ("glm45", "glm45")),
        ("glm4_moe", "<think> <tool_call> <arg_key>{{ k }}</arg_key><arg_value>", ("glm47", "glm45")),
        ("llama", "{{ messages }}", (None, None)),
        ("llama", None, (None, None)),
    ],
)
def test_parsers_of_a_model(model_type: str, template: str | None, parsers: tuple[str | None, str | None]) -> None:
    assert detect(model_type, template, FixtureTokenizer(["<|channel|>", "<|tool_call_start|>", "[THINK]"])) == parsers


def test_gpt_oss_without_harmonys_tokens_writes_no_harmony() -> None:
    assert detect("gpt_oss", "", FixtureTokenizer(())) == (None, None)
