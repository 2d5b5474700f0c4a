"""A chat with tools for a template that knows none, such as the demo model's: all is text, and turns end where they end."""

from typing import Any

import pytest

from transom_core.text.chat_template import ChatTemplate
from transom_core.text.default_tool_prompt import messages_with_tools
from transom_core.text.tokenizer import Tokenizer

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c", "function": {"name": "weather", "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln and Bonn?"},
    {"role": "assistant", "content": None, "tool_calls": [call(place="Köln"), call(place="Bonn")]},
    {"role": "tool", "content": "rain", "tool_call_id": "c"},
    {"role": "tool", "content": "sun", "tool_call_id": "c"},
    {"role": "assistant", "content": "Rain, and sun."},
    {"role": "user", "content": "Thanks"},
]


def test_the_demo_models_template_gets_tools_calls_and_results_as_text(demo: Tokenizer) -> None:
    assert (demo.model_type, demo.template_knows_tools) == ("llama", False)
    text = demo.apply_chat_template(CHAT, extra={"tools": TOOLS}).text
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "weather",' in text
    calls = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>\n<tool_call>\n{"name": "weather"'
    assert f"<|im_start|>assistant\n{calls}" in text
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text


def test_turn_boundaries_are_where_the_written_messages_end(demo: Tokenizer) -> None:
    prompt = demo.apply_chat_template(CHAT, extra={"tools": TOOLS})
    first = demo.apply_chat_template(CHAT[:1], extra={"tools": TOOLS})
    assert len(prompt.turn_boundaries) == 6  # system, user, calls, both results, answer, user
    starts = [i for i, token in enumerate(prompt.token_ids) if demo.token(token) == "<|im_start|>"]
    assert prompt.turn_boundaries == tuple(starts[1:])
    assert set(first.turn_boundaries) < set(prompt.turn_boundaries)  # the next request's prefix


def test_the_section_goes_after_the_clients_own_system_prompt() -> None:
    system, *_ = messages_with_tools([{"role": "system", "content": "Be brief."}, *CHAT], TOOLS)
    assert system["content"].startswith("Be brief.\n\n# Tools\n")


def test_calls_keep_the_text_beside_them_and_arguments_that_are_no_object() -> None:
    cut = {"type": "function", "function": {"name": "weather", "arguments": '{"place": "K'}}
    (message,) = messages_with_tools([{"role": "assistant", "content": "I look.", "tool_calls": [cut]}], ())
    assert message == {
        "role": "assistant",
        "content": 'I look.\n<tool_call>\n{"name": "weather", "arguments": "{\\"place\\": \\"K"}\n</tool_call>',
    }


@pytest.mark.parametrize(
    ("source", "tool_source", "knows"),
    [
        ("{% if tools %}x{% endif %}", None, (True, True)),
        ("{% for t in tools or [] %}x{% endfor %}", None, (True, True)),
        ("{# no tools #}{{ 'tools' }}{{ messages[0].tools }}", None, (False, False)),
        ("plain", "{{ tools }}", (False, True)),
        ("{% if tools", None, (False, False)),
    ],
)
def test_a_template_knows_tools_if_it_reads_the_variable(source: str, tool_source: str | None, knows: Any) -> None:
    template = ChatTemplate(source=source, tool_source=tool_source, special_tokens={})
    assert (template.knows_tools(has_tools=False), template.knows_tools(has_tools=True)) == knows
