"""Which parsers a model gets by its kind and chat template."""

import pytest

from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer
from transom_core.text.markup.detection import detect

_HERMES = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'


@pytest.mark.parametrize(
    ("model_type", "template", "parsers"),
    [
        ("qwen2", _HERMES, ("hermes", None)),
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
        ("deepseek_v41", "<｜DSML｜ calls>", ("deepseek_v41", "deepseek_v4")),
        ("glm4_moe", "<think> <tool_call> <arg_key>{{ k }}</arg_key>\n<arg_value>", ("glm45", "glm45")),
        ("glm4_moe", "<think> <tool_call> <arg_key>{{ k }}</arg_key><arg_value>", ("glm47", "glm45")),
        ("llama", "{{ messages }}", (None, None)),
        ("llama", None, (None, None)),
    ],
)
def test_parsers_of_a_model(model_type: str, template: str | None, parsers: tuple[str | None, str | None]) -> None:
    assert detect(model_type, template, FixtureTokenizer(["<|channel|>"])) == parsers


def test_gpt_oss_without_harmonys_tokens_writes_no_harmony() -> None:
    assert detect("gpt_oss", "", FixtureTokenizer(())) == (None, None)
