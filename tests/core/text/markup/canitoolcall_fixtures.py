"""Runs the fixtures of the package `canitoolcall` (recorded and rendered answers of real models) through our parsers.

Without the models' tokenizers, an answer is cut into pseudo-tokens: each marker of the family is one token, as in the real
tokenizers, and ordinary text is cut into words. Markers come in three ways, all of which occur: as special tokens without text
(`skip_special_tokens`), as special tokens with their text, and as ordinary text that is cut anywhere.

The judge is `canitoolcall.checks`: it compares the parse of the whole answer with what the fixture expects, and each stream with
that. Its status "pass" means equal, "soft_pass" equal but for space around the texts.
"""

import random
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.markup_parser import MarkupParser
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
    join_parts,
)

MarkerStyle = Literal["special", "special_with_text", "ordinary"]
MARKER_STYLES: tuple[MarkerStyle, ...] = ("special", "special_with_text", "ordinary")

# By fixture family, or by the variant of the fixture's model.
PARSERS: dict[str, tuple[str, str | None]] = {
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
    "llama3-json": ("llama3_json", None),
    "llama4-pythonic": ("llama4_pythonic", None),
    "mistral": ("mistral", "mistral"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "gemma4": ("gemma4", "gemma4"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3"),
    "deepseek-v31": ("deepseek_v31", "deepseek_v3"),
    "deepseek-v4": ("deepseek_v4", "deepseek_v4"),
    "deepseek-v41": ("deepseek_v41", "deepseek_v41"),
    "glm45-newline": ("glm45", "glm45"),
    "glm47-compact": ("glm47", "glm45"),
    "glm53-compact": ("glm47", "glm45"),
    "kimi-k2-thinking": ("kimi_k2", "kimi_k2"),
    "kimi-k2-instruct": ("kimi_k2", None),
}

_ORDINARY_ID = 7  # the id of all ordinary pseudo-tokens
_END_ID = 9
_WORD = re.compile(r"\s*[^\W_]+|.", re.DOTALL)


class FixtureTokenizer:
    """A tokenizer that knows some special tokens, and nothing else."""

    eos_token_ids = (_END_ID,)

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._ids = {text: 1000 + i for i, text in enumerate(special_tokens)}
        self._texts = {i: text for text, i in self._ids.items()}

    def marker_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._texts or token_id in self.eos_token_ids

    def token(self, token_id: int) -> str:
        return self._texts.get(token_id, "")

    def cut(self, text: str, *, shows_special: bool) -> list[tuple[int, str]]:
        """Pseudo-tokens of `text`: ids and texts."""
        tokens: list[tuple[int, str]] = []
        markers = "|".join(re.escape(marker) for marker in sorted(self._ids, key=len, reverse=True))
        for piece in re.split(f"({markers})", text) if markers else [text]:
            if piece in self._ids:
                tokens.append((self._ids[piece], piece if shows_special else ""))
            else:
                tokens += [(_ORDINARY_ID, word) for word in _WORD.findall(piece)]
        return tokens


@cache
def families() -> dict[str, Family]:
    return load_families()


@cache
def all_fixtures() -> tuple[Fixture, ...]:
    """All fixtures of all families."""
    return tuple(load_fixtures())


def variant(fixture: Fixture) -> str:
    """The variant of its family that a fixture's model writes."""
    reference = families()[fixture.family].reference_for(fixture.reference_model)
    return (reference.variant if reference else None) or ""


def parsers_of(fixture: Fixture) -> tuple[str, str | None] | None:
    """The parsers for a fixture's model; None for a family that is not read yet."""
    return PARSERS.get(fixture.family) or PARSERS.get(variant(fixture))


def run_fixture(answer_format: AnswerFormat, fixture: Fixture, *, style: MarkerStyle) -> tuple[Status, list[str]]:
    """The status of parsing a fixture whole, token by token, and in random chunks of text (which only ordinary markers allow);
    and what failed."""
    family = families()[fixture.family]
    tokenizer = FixtureTokenizer(() if style == "ordinary" else family.markers)
    context = fixture_context(fixture)
    text = fixture.raw_output

    def parse(tokens: Sequence[tuple[int, str]]) -> ParseResult:
        return parse_result(read_answer(answer_format.parser(tokenizer, context), tokens))

    tokens = tokenizer.cut(text, shows_special=style == "special_with_text")
    streams = {"token": parse(tokens)}
    if style == "ordinary":
        streams["one"] = parse([(_ORDINARY_ID, text)])
        for seed in range(1, 6):
            streams[f"rand:{seed}:8"] = parse([(_ORDINARY_ID, chunk) for chunk in random_chunks(text, seed=seed)])
    whole = streams.pop("one", streams["token"])
    observation = Observation(nonstream=whole, streams=streams)
    rows = run_checks(fixture, family, observation)
    bad = [f"{row.check} {row.strategy}: {row.detail}" for row in rows if row.status in (Status.FAIL, Status.ERROR)]
    return case_status(rows), bad


def fixture_context(fixture: Fixture) -> AnswerContext:
    """The request that a fixture answers."""
    reference = families()[fixture.family].reference_for(fixture.reference_model)
    prompt_end = fixture.generation_prompt
    if prompt_end is None:
        prompt_end = (reference.default_generation_prompt if reference else None) or ""
    functions = [tool["function"] for tool in fixture.tools]
    return AnswerContext(
        tools=tuple(ToolSpec(function["name"], function.get("parameters") or {}) for function in functions),
        parses_tools=True,
        parses_reasoning=True,
        prompt_end=prompt_end,
    )


def read_answer(parser: MarkupParser, tokens: Iterable[tuple[int, str]]) -> list[AnswerPart]:
    """All parts of an answer, joined."""
    return join_parts([part for token_id, text in tokens for part in parser.push(token_id, text)] + parser.flush())


def parse_result(parts: Iterable[AnswerPart]) -> ParseResult:
    """An answer's parts as a client sees them: only complete calls are calls."""
    parts = list(parts)
    names = {part.index: part.name for part in parts if isinstance(part, CallBegin)}
    complete = {part.index for part in parts if isinstance(part, CallEnd) and part.is_complete}
    return ParseResult(
        content="".join(part.text for part in parts if isinstance(part, MessageText)) or None,
        reasoning_content="".join(part.text for part in parts if isinstance(part, ReasoningText)) or None,
        tool_calls=tuple(ParsedToolCall(names[i], call_arguments(parts, i)) for i in sorted(complete)),
    )


def call_arguments(parts: Iterable[AnswerPart], index: int) -> str:
    """The JSON text of one call's arguments."""
    return "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index)


def all_text(parts: Sequence[AnswerPart]) -> str:
    """What all parts say; markup that is both counted and shown, twice."""
    texts = []
    for part in parts:
        if isinstance(part, CallBegin):
            texts.append(part.name)
        elif isinstance(part, ReasoningText | MessageText | CallArguments | MalformedMarkup):
            texts.append(part.text)
    return " ".join(texts)


def random_chunks(text: str, *, seed: int, longest: int = 8) -> list[str]:
    """`text` in pieces of 1 to `longest` characters."""
    rng = random.Random(seed)
    chunks: list[str] = []
    start = 0
    while start < len(text):
        end = start + rng.randint(1, longest)
        chunks.append(text[start:end])
        start = end
    return chunks
