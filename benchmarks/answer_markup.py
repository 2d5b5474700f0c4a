"""What it costs the router to read an answer's markup: microseconds of CPU a token, by family and kind of text.

python benchmarks/answer_markup.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.formats import answer_format

_NUM_TOKENS = 50_000
_TOOLS = (ToolSpec("write", {"type": "object", "properties": {"text": {"type": "string"}}}),)
_KIMI_CALL = '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"text": "'
_WORDS = ("The", " quick", " brown", " fox", " jumps", ",", " over", " the", " lazy", " dog", ".", "\n")


class _Tokenizer:
    """A tokenizer without special tokens."""

    eos_token_ids = ()

    def marker_id(self, text: str) -> int | None:
        return None

    def is_special(self, token_id: int) -> bool:
        return False

    def token(self, token_id: int) -> str:
        return ""


def main() -> None:
    """Print a table."""
    words = [_WORDS[i % len(_WORDS)] for i in range(_NUM_TOKENS)]
    escaped = [json.dumps(word)[1:-1] for word in words]
    answers: list[tuple[str, str | None, str | None, list[str]]] = [
        ("plain text", None, None, words),
        ("message", "hermes", "qwen3", words),
        ("reasoning", "hermes", "qwen3", ["<think>", *words]),
        ("arguments, hermes", "hermes", "qwen3", ['<tool_call>{"name": "write", "arguments": {"text": "', *escaped]),
        ("arguments, llama3_json", "llama3_json", None, ['{"name": "write", "parameters": {"text": "', *escaped]),
        ("arguments, pythonic", "pythonic", None, ["[write(text='", *escaped]),
        ("arguments, mistral", "mistral", "mistral", ['[TOOL_CALLS]write[ARGS]{"text": "', *escaped]),
        (
            "arguments, qwen3_coder",
            "qwen3_coder",
            "qwen3",
            ["<tool_call>\n<function=write>\n<parameter=text>\n", *words],
        ),
        ("arguments, glm45", "glm45", "glm45", ["<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>", *words]),
        (
            "arguments, openai",
            "openai",
            None,
            ['<|channel|>commentary to=functions.write<|message|>{"text": "', *escaped],
        ),
        (
            "arguments, deepseek_v4",
            "deepseek_v4",
            "deepseek_v4",
            [
                '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">',
                *words,
            ],
        ),
        ("arguments, kimi_k2", "kimi_k2", None, ["<|tool_calls_section_begin|>" + _KIMI_CALL, *escaped]),
        ("arguments, gemma4", "gemma4", "gemma4", ['<|tool_call>call:write{text:<|"|>', *words]),
    ]
    print(f"| answer of {_NUM_TOKENS:,} tokens | us of CPU a token |\n|---|---|")
    for name, tools, reasoning, tokens in answers:
        seconds = min(_seconds(tools, reasoning, tokens) for _ in range(3))
        print(f"| {name} | {seconds / len(tokens) * 1e6:.2f} |")


def _seconds(tools: str | None, reasoning: str | None, tokens: Iterable[str]) -> float:
    context = AnswerContext(_TOOLS, parses_tools=True, parses_reasoning=True)
    parser = answer_format(tools, reasoning).parser(_Tokenizer(), context)
    start = time.thread_time()
    for text in tokens:
        parser.push(1, text)
    parser.flush()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
