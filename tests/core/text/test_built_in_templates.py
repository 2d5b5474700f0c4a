"""The built-in chat templates write what the Python scripts of DeepSeek V3.2 and V4 write. And a chat with tools for a template
that knows none, such as the demo model's: all is text, and turns end where they end."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.tiny_checkpoints import byte_tokenizer
from transom_core.model_files.resolve import ModelFiles
from transom_core.text.built_in_templates import built_in_template
from transom_core.text.chat_template import ChatTemplate
from transom_core.text.default_tool_prompt import messages_with_tools
from transom_core.text.markup.detection import detect
from transom_core.text.tokenizer import Tokenizer as OwnTokenizer

USER, ASSISTANT, END = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
BEGIN = "<｜begin▁of▁sentence｜>"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
SCHEMAS = '{"name": "f", "description": "é", "parameters": {"type": "object"}}\n{"name": "g"}\n'
WEATHER_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
]


def _call(id_: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "Looking.",
    "reasoning_content": "Two tools.",
    "tool_calls": [_call("1", "f", {"city": "Paris", "n": 3, "o": {"x": ["é", None]}}), _call("2", "g", {})],
}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    CALLING,
    {"role": "tool", "tool_call_id": "2", "content": "wind"},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
PLAIN_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Bye"},
]


DSML_CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="o" string="false">{"x": ["é", null]}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)


def _render(messages: list[dict[str, Any]], *, family: str = "deepseek_v4", **variables: Any) -> str:
    source = built_in_template(family, lambda token: 1)
    assert source is not None
    template = ChatTemplate(source=source, special_tokens={})
    return template.render_chat(messages, add_generation_prompt=True, extra=variables).text


def test_it_has_tools_after_the_system_prompt_and_results_in_the_order_of_the_calls() -> None:
    system, rest = _render(TOOL_CHAT, tools=TOOLS, thinking=True).split(USER, 1)
    assert system.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access")
    assert f"### Available Tool Schemas\n\n{SCHEMAS}\nYou MUST strictly follow" in system
    assert rest == (
        f"Weather?{ASSISTANT}<think>Two tools.</think>Looking.{DSML_CALLS}{END}"
        f"{USER}<tool_result>rain</tool_result>\n\n<tool_result>wind</tool_result>{ASSISTANT}<think>"
    )


def test_tools_and_results_of_v32() -> None:
    text = _render([*TOOL_CHAT, *PLAIN_CHAT], family="deepseek_v32", tools=TOOLS, thinking=True)
    system, rest = text.split(USER, 1)
    assert system.startswith(f"{BEGIN}Be brief.\n\n## Tools\nYou have access")
    assert f"<functions>\n{SCHEMAS}</functions>\n" in system
    calls = DSML_CALLS.replace("tool_calls>", "function_calls>")
    results = "<function_results>\n<result>rain</result>\n<result>wind</result>\n</function_results>"
    assert rest == (
        f"Weather?{ASSISTANT}</think>Looking.{calls}{END}\n\n{results}\n\n</think>"
        f"{USER}Hi{ASSISTANT}</think>Hello.{END}{USER}Bye{ASSISTANT}<think>"
    )
    text = _render(TOOL_CHAT, family="deepseek_v32", thinking=True)
    assert text.endswith(f"{ASSISTANT}<think>Two tools.</think>Looking.{calls}{END}\n\n{results}\n\n<think>")


def test_thoughts_of_earlier_turns_are_dropped() -> None:
    begin = f"{BEGIN}{USER}Hi{ASSISTANT}</think>Hello.{END}{USER}Bye{ASSISTANT}"
    assert _render(PLAIN_CHAT, thinking=True) == f"{begin}<think>"
    assert _render(PLAIN_CHAT) == f"{begin}</think>"
    assert _render(PLAIN_CHAT, reasoning_effort="none") == f"{begin}</think>"
    assert _render(PLAIN_CHAT, reasoning_effort="high") == f"{begin}<think>"
    assert _render(PLAIN_CHAT, reasoning_effort="high", thinking=False) == f"{begin}</think>"
    assert _render(PLAIN_CHAT, reasoning_effort="max").startswith(f"{BEGIN}Reasoning Effort: Absolute maximum")


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    messages = [*TOOL_CHAT[:2], {**CALLING, "tool_calls": [_call("1", "f", '{"city": "Par')]}]
    assert '<｜DSML｜parameter name="arguments" string="true">{"city": "Par</｜DSML｜parameter>' in _render(
        messages, tools=TOOLS
    )


def _save_tokenizer(folder: Path, *added: str) -> None:
    rust = byte_tokenizer().backend_tokenizer
    rust.add_special_tokens([AddedToken(text, special=True) for text in added])
    rust.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_a_model_without_a_template_gets_its_familys(tmp_path: Path, family: str) -> None:
    config = {"model_type": family}
    files = ModelFiles(name="m", path=tmp_path, is_gguf=False, config=config, generation_config={})
    _save_tokenizer(tmp_path)  # a vocabulary without the family's tokens has no use for its template
    assert OwnTokenizer.load(files).chat_template is None
    _save_tokenizer(tmp_path, USER, ASSISTANT)
    tokenizer = OwnTokenizer.load(files)
    assert tokenizer.template_knows_tools
    assert detect(tokenizer.model_type, tokenizer.chat_template, tokenizer) == (family, "deepseek_v4")
    own = {"chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert OwnTokenizer.load(files).chat_template == own["chat_template"]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c", "function": {"name": "weather", "arguments": arguments}}


WEATHER_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln and Bonn?"},
    {"role": "assistant", "content": None, "tool_calls": [call(place="Köln"), call(place="Bonn")]},
    {"role": "tool", "content": "rain", "tool_call_id": "c"},
    {"role": "tool", "content": "sun", "tool_call_id": "c"},
    {"role": "assistant", "content": "Rain, and sun."},
    {"role": "user", "content": "Thanks"},
]


def test_the_demo_models_template_gets_tools_calls_and_results_as_text(demo: OwnTokenizer) -> None:
    assert (demo.model_type, demo.template_knows_tools) == ("llama", False)
    text = demo.apply_chat_template(WEATHER_CHAT, extra={"tools": WEATHER_TOOLS}).text
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "weather",' in text
    calls = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>\n<tool_call>\n{"name": "weather"'
    assert f"<|im_start|>assistant\n{calls}" in text
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text


def test_turn_boundaries_are_where_the_written_messages_end(demo: OwnTokenizer) -> None:
    prompt = demo.apply_chat_template(WEATHER_CHAT, extra={"tools": WEATHER_TOOLS})
    first = demo.apply_chat_template(WEATHER_CHAT[:1], extra={"tools": WEATHER_TOOLS})
    assert len(prompt.turn_boundaries) == 6  # system, user, calls, both results, answer, user
    starts = [i for i, token in enumerate(prompt.token_ids) if demo.token(token) == "<|im_start|>"]
    assert prompt.turn_boundaries == tuple(starts[1:])
    assert set(first.turn_boundaries) < set(prompt.turn_boundaries)  # the next request's prefix


def test_the_section_goes_after_the_clients_own_system_prompt() -> None:
    system, *_ = messages_with_tools([{"role": "system", "content": "Be brief."}, *WEATHER_CHAT], WEATHER_TOOLS)
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
