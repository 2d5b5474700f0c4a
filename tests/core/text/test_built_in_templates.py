"""The built-in chat template writes what DeepSeek V4's own Python script writes."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from transom_core.model_files.resolve import ModelFiles
from transom_core.text.built_in_templates import built_in_template
from transom_core.text.chat_template import ChatTemplate
from transom_core.text.markup.detection import detect
from transom_core.text.tokenizer import Tokenizer as OwnTokenizer

USER, ASSISTANT, END = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
BEGIN = "<｜begin▁of▁sentence｜>"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
SCHEMAS = '{"name": "f", "description": "é", "parameters": {"type": "object"}}\n{"name": "g"}\n'


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


def _render(messages: list[dict[str, Any]], **variables: Any) -> str:
    source = built_in_template("deepseek_v4", lambda token: 1)
    assert source is not None
    template = ChatTemplate(source=source, special_tokens={})
    return template.render_chat(messages, add_generation_prompt=True, extra=variables).text


def test_it_has_tools_after_the_system_prompt_and_results_in_the_order_of_the_calls() -> None:
    text = _render(TOOL_CHAT, tools=TOOLS, thinking=True)
    system, rest = text.split(USER, 1)
    assert system.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access")
    assert f"### Available Tool Schemas\n\n{SCHEMAS}\nYou MUST strictly follow" in system
    assert rest == (
        f"Weather?{ASSISTANT}<think>Two tools.</think>Looking.{DSML_CALLS}{END}"
        f"{USER}<tool_result>rain</tool_result>\n\n<tool_result>wind</tool_result>{ASSISTANT}<think>"
    )


def test_thoughts_of_earlier_turns_are_dropped() -> None:
    begin = f"{BEGIN}{USER}Hi{ASSISTANT}</think>Hello.{END}{USER}Bye{ASSISTANT}"
    assert _render(PLAIN_CHAT, thinking=True) == f"{begin}<think>"
    assert _render(PLAIN_CHAT) == f"{begin}</think>"
    assert _render(PLAIN_CHAT, reasoning_effort="none") == f"{begin}</think>"
    assert _render(PLAIN_CHAT, reasoning_effort="high") == f"{begin}<think>"
    assert _render(PLAIN_CHAT, reasoning_effort="high", thinking=False) == f"{begin}</think>"


def test_it_thinks_as_long_as_it_can_where_the_effort_says_so() -> None:
    text = _render(PLAIN_CHAT, reasoning_effort="max")
    assert text.startswith(f"{BEGIN}Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    messages = [*TOOL_CHAT[:2], {**CALLING, "tool_calls": [_call("1", "f", '{"city": "Par')]}]
    assert '<｜DSML｜parameter name="arguments" string="true">{"city": "Par</｜DSML｜parameter>' in _render(
        messages, tools=TOOLS
    )


def _save_tokenizer(folder: Path, *added: str) -> None:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rust = Tokenizer(models.BPE(vocabulary, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(text, special=True) for text in added])
    rust.save(str(folder / "tokenizer.json"))


def test_a_model_without_a_template_gets_its_familys(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v4"}
    files = ModelFiles(name="m", path=tmp_path, is_gguf=False, config=config, generation_config={})
    _save_tokenizer(tmp_path)  # a vocabulary without the family's tokens has no use for its template
    assert OwnTokenizer.load(files).chat_template is None
    _save_tokenizer(tmp_path, USER, ASSISTANT)
    tokenizer = OwnTokenizer.load(files)
    assert tokenizer.template_knows_tools
    assert detect(tokenizer.model_type, tokenizer.chat_template, tokenizer) == ("deepseek_v4", "deepseek_v4")
    own = {"chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert OwnTokenizer.load(files).chat_template == own["chat_template"]
