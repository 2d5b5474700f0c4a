"""Detects which parsers a model needs, from its `model_type` and chat template, if the operator names none."""

from collections.abc import Callable
from dataclasses import dataclass

from transom_core.text.markup.context import MarkupTokenizer


@dataclass(frozen=True, slots=True)
class _Rule:
    """A parser, and how to recognise a model that needs it."""

    parser: str
    applies: Callable[[str, str], bool]  # (model_type, chat template) -> whether the model needs the parser
    token: str | None = None  # a marker that must also be one token of the vocabulary


def _template_has(*texts: str) -> Callable[[str, str], bool]:
    return lambda model_type, template: all(text in template for text in texts)


def _is_type(*model_types: str) -> Callable[[str, str], bool]:
    return lambda model_type, template: model_type in model_types


# The first rule that applies decides, so a rule for one family comes before a rule whose texts that family's template also has.
_TOOL_RULES = (
    _Rule("openai", _is_type("gpt_oss"), "<|channel|>"),
    _Rule("gemma4", _template_has("<|tool_call>")),
    _Rule("kimi_k2", _template_has("<|tool_calls_section_begin|>")),
    _Rule("deepseek_v32", _template_has("｜DSML｜", "function_calls>")),
    _Rule("deepseek_v4", _template_has("<｜DSML｜tool_calls>")),
    _Rule("deepseek_v41", _template_has("<｜DSML｜ calls>")),
    _Rule("deepseek_v3", _template_has("<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseek_v31", _template_has("<｜tool▁calls▁begin｜>")),
    _Rule("glm45", _template_has("</arg_key>\n<arg_value>")),
    _Rule("glm47", _template_has("<arg_key>")),
    _Rule("qwen3_coder", _template_has("<tool_call>", "<function=")),
    _Rule("seed_oss", _template_has("<seed:tool_call>")),
    _Rule("minimax_m2", _template_has("<minimax:tool_call>")),
    _Rule("jamba", lambda model_type, template: model_type == "jamba" and "<tool_calls>" in template),
    _Rule("nemotron_json", _template_has("<TOOLCALL>")),
    _Rule("olmo3", _template_has("<function_calls>")),
    _Rule("lfm2", _is_type("lfm2", "lfm2_moe"), "<|tool_call_start|>"),
    _Rule("granite", _template_has("<|tool_call|>", "assistant")),
    _Rule("cohere_command3", _template_has("<|START_ACTION|>")),
    _Rule("hermes", _template_has("<tool_call>", '"name')),
    _Rule("llama4_pythonic", _is_type("llama4", "llama4_text")),
    _Rule("mistral", _template_has("[TOOL_CALLS]")),
    _Rule("llama3_json", _template_has("<|start_header_id|>", '"parameters"')),
)
_REASONING_RULES = (
    _Rule("openai_gptoss", _is_type("gpt_oss"), "<|channel|>"),
    _Rule("gemma4", _template_has("<|channel>")),
    _Rule("kimi_k2", _template_has("<|tool_calls_section_begin|>", "<think>")),
    _Rule("deepseek_v4", _template_has("｜DSML｜")),
    _Rule("deepseek_v3", _template_has("<｜tool▁calls▁begin｜>", "</think>")),
    _Rule("glm45", _template_has("<arg_key>", "<think>")),
    _Rule("seed_oss", _template_has("<seed:think>")),
    _Rule("mistral", _template_has("[THINK]"), "[THINK]"),
    _Rule("granite", _template_has("Here is my thought process:")),
    _Rule("cohere_command3", _template_has("<|START_RESPONSE|>")),
    _Rule("cohere_command3", _template_has("<|START_THINKING|>")),
    _Rule("qwen3", _template_has("<think>")),
)


def detect(model_type: str, chat_template: str | None, tokenizer: MarkupTokenizer) -> tuple[str | None, str | None]:
    """Return the names of a model's tool call parser and reasoning parser; None for a markup that no rule finds."""

    def first(rules: tuple[_Rule, ...]) -> str | None:
        for rule in rules:
            has_token = rule.token is None or tokenizer.marker_id(rule.token) is not None
            if has_token and rule.applies(model_type, chat_template or ""):
                return rule.parser
        return None

    return first(_TOOL_RULES), first(_REASONING_RULES)
