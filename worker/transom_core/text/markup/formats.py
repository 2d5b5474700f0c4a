"""Maps the names of parsers, which are vLLM's, to the markups that they stand for."""

from collections.abc import Mapping

from transom_core.errors import RequestError
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.call_object import CallKeys
from transom_core.text.markup.families.deepseek_sections import DeepSeekV3Tools, DeepSeekV31Tools
from transom_core.text.markup.families.dsml import DsmlTools
from transom_core.text.markup.families.gemma4 import Gemma4Tools
from transom_core.text.markup.families.glm import GlmTools
from transom_core.text.markup.families.harmony import HarmonyFormat
from transom_core.text.markup.families.json_calls import HermesTools, JsonArrayTools, Llama3JsonTools
from transom_core.text.markup.families.kimi_k2 import KimiK2Tools
from transom_core.text.markup.families.mistral import MistralTools
from transom_core.text.markup.families.pythonic import Lfm2Tools, Llama4Tools, Olmo3Tools, PythonicTools
from transom_core.text.markup.families.qwen3_coder import Qwen3CoderTools
from transom_core.text.markup.reasoning import (
    ASSUMED_THINK,
    COHERE,
    GEMMA4,
    GRANITE,
    MISTRAL,
    SEED_OSS,
    THINK,
    ReasoningMarkup,
)
from transom_core.text.markup.tool_markup import ToolMarkup

_COHERE = JsonArrayTools(
    "<|START_ACTION|>", end="<|END_ACTION|>", keys=CallKeys("tool_name", "parameters", number="tool_call_id")
)
_TOOLS: Mapping[str, ToolMarkup] = {
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": DeepSeekV3Tools(),
    "deepseek_v31": DeepSeekV31Tools(),
    "deepseek_v32": DsmlTools("function_calls"),
    "deepseek_v4": DsmlTools("tool_calls"),
    "deepseek_v41": DsmlTools(" calls"),
    "gemma4": Gemma4Tools(),
    "glm45": GlmTools("\n"),
    "glm47": GlmTools(""),
    "hermes": HermesTools(),
    "granite4": HermesTools(),
    "kimi_k2": KimiK2Tools(),
    "qwen2_5": HermesTools(),
    "qwen3": HermesTools(),
    "lfm2": Lfm2Tools(),
    "llama3_json": Llama3JsonTools(),
    "llama4_json": Llama3JsonTools(),
    "llama4_pythonic": Llama4Tools(),
    "pythonic": PythonicTools(),
    "minimax_m2": DsmlTools("minimax:tool_call", token=""),
    "mistral": MistralTools(),
    "granite": JsonArrayTools("<|tool_call|>", "<tool_call>"),
    "jamba": JsonArrayTools("<tool_calls>", end="</tool_calls>"),
    "nemotron_json": JsonArrayTools("<TOOLCALL>", end="</TOOLCALL>"),
    "olmo3": Olmo3Tools(),
    "mimo": Qwen3CoderTools(),
    "qwen3_coder": Qwen3CoderTools(),
    "qwen3_xml": Qwen3CoderTools(),
    "seed_oss": Qwen3CoderTools("seed:tool_call", line_end=""),
}
_THINK_PARSERS = (
    *("qwen3", "deepseek_v3", "deepseek_v4", "deepseek_v41", "glm45", "glm47", "kimi_k2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3"),
)
_REASONING: Mapping[str, ReasoningMarkup] = {
    **dict.fromkeys(_THINK_PARSERS, THINK),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "deepseek_r1": ASSUMED_THINK,
    "gemma4": GEMMA4,
    "seed_oss": SEED_OSS,
    "granite": GRANITE,
    "mistral": MISTRAL,
}
# Families with one markup for reasoning and calls: either name, of the tool call parser or the reasoning parser, selects it.
_WHOLE: Mapping[str, type[AnswerFormat]] = {"openai": HarmonyFormat, "openai_gptoss": HarmonyFormat}

TOOL_PARSERS: tuple[str, ...] = (*_TOOLS, *(name for name in _WHOLE if name not in _TOOLS))
REASONING_PARSERS: tuple[str, ...] = (*_REASONING, *(name for name in _WHOLE if name not in _REASONING))


def answer_format(tool_parser: str | None = None, reasoning_parser: str | None = None) -> AnswerFormat:
    """Return the format with these two markups. If one is None, the format treats such markup as ordinary text.

    Raises:
        RequestError: there is no parser of this name. The message lists the names.
    """
    for name in (tool_parser, reasoning_parser):
        if name is not None and name in _WHOLE:
            return _WHOLE[name]()
    if tool_parser is not None and tool_parser not in _TOOLS:
        raise RequestError(
            f"There is no tool call parser {tool_parser!r}; there are {', '.join(sorted(TOOL_PARSERS))}."
        )
    if reasoning_parser is not None and reasoning_parser not in _REASONING:
        raise RequestError(
            f"There is no reasoning parser {reasoning_parser!r}; there are {', '.join(sorted(REASONING_PARSERS))}."
        )
    return AnswerFormat(
        tools=_TOOLS[tool_parser] if tool_parser else None,
        reasoning=_REASONING[reasoning_parser] if reasoning_parser else None,
    )
