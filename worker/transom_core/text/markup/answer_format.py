"""`AnswerFormat`: a model's whole markup. It makes a parser for each answer, and a grammar if the request constrains the answer."""

from collections.abc import Generator
from dataclasses import replace
from typing import assert_never

from transom_core.text.markup.context import (
    AnswerContext,
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MarkupTokenizer,
    MessageDemand,
    RegexAnswer,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.markup_parser import MarkupParser
from transom_core.text.markup.reader import SPACE, AnswerEnded, Markers, MarkupReader, Reading
from transom_core.text.markup.reasoning import ReasoningMarkup
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup
from transom_core.text.markup.writer import PartsWriter


class AnswerFormat:
    """A reasoning markup and a tool markup, either of which may be missing. A family with one markup for both is a subclass.

    parser = format.parser(tokenizer, context)      then `parser.push` for each token of the answer
    grammar = format.grammar(tokenizer, context, message=..., tools=...)      for the worker, which samples by it
    """

    def __init__(self, *, tools: ToolMarkup | None = None, reasoning: ReasoningMarkup | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning

    def parser(self, tokenizer: MarkupTokenizer, context: AnswerContext) -> MarkupParser:
        """Return a parser for one answer."""
        tools = self._tools if context.parses_tools else None
        reasoning = self._reasoning if context.parses_reasoning else None
        markers = (*(tools.openers + tools.markers if tools else ()), *(reasoning.tokens if reasoning else ()))
        reader, writer = MarkupReader(), PartsWriter(keeps_space=bool(tools and tools.keeps_space))
        answer = _Answer(reader, writer, context, tools=tools, reasoning=reasoning)
        return MarkupParser(answer.read(), reader, writer, tokenizer=tokenizer, markers=markers)

    def grammar(
        self,
        tokenizer: MarkupTokenizer,
        context: AnswerContext,
        *,
        message: MessageDemand,
        tools: ToolsDemand | None = None,
    ) -> str | None:
        """Return the grammar of the whole answer, in llguidance's dialect of Lark; None if nothing constrains the answer.

        The reasoning is free text up to its end marker. After it comes a message that `message` allows, or calls that `tools`
        allow; without `tools` there are no calls.
        """
        if isinstance(message, FreeAnswer) and (tools is None or not _holds(context, tools)):
            return None
        return self._held_grammar(tokenizer, context, message, tools)

    def _held_grammar(
        self, tokenizer: MarkupTokenizer, context: AnswerContext, message: MessageDemand, tools: ToolsDemand | None
    ) -> str:
        """Return the grammar of an answer that is constrained."""
        reasoning = self._reasoning if context.parses_reasoning else None
        lark = LarkText(
            tokenizer, inner_tokens=[text for part in (self._tools, reasoning) if part for text in part.inner_tokens]
        )
        # If a call may end the reasoning, the grammar's reasoning must not contain an opener: the grammar would take the call after
        # the opener for reasoning, and would not constrain its arguments.
        without = self._tools.openers if tools and self._tools and self._tools.ends_reasoning else ()
        begin = reasoning.rule(lark, context.prompt_end, without=without) if reasoning else ""
        if reasoning and (tools is None or tools.mode == "auto"):
            begin = f"{begin} {reasoning.message_opening(lark)}"
        choices = [] if isinstance(message, FreeAnswer) else [message_expression(lark, message)]
        if tools is not None:
            choices.append(self._calls(lark, context, tools, in_text=isinstance(message, FreeAnswer)))
            if tools.mode == "required":
                choices = choices[-1:]
        return lark.text(f"{begin} {lark.rule('answer', ' | '.join(choices))}".strip())

    def _calls(self, lark: LarkText, context: AnswerContext, demand: ToolsDemand, *, in_text: bool) -> str:
        if self._tools is None:
            raise ValueError("The model has no markup for tool calls.")  # the router has refused such requests
        is_after_text = in_text and demand.mode == "auto"
        calls = self._tools.calls_after_text if is_after_text else self._tools.calls
        return calls(lark, tools_to_hold(context, demand), parallel=demand.parallel)


def _holds(context: AnswerContext, demand: ToolsDemand) -> bool:
    """Return whether an answer with a free message and these calls needs a grammar."""
    return (
        demand.mode == "required"
        or not demand.parallel
        or any(tool.strict or tool.name not in demand.names for tool in context.tools)
    )


def tools_to_hold(context: AnswerContext, demand: ToolsDemand) -> list[ToolSpec]:
    """Return the tools that may be called, each with the schema that the grammar enforces for its arguments."""
    tools = [tool for tool in context.tools if tool.name in demand.names]
    if demand.mode == "required":
        return tools
    return [tool if tool.strict else replace(tool, parameters={}) for tool in tools]


def message_expression(lark: LarkText, demand: MessageDemand) -> str:
    """Return a grammar's expression for a message that `demand` allows."""
    match demand:
        case JsonAnswer(schema):
            return lark.json({"type": "object"} if schema is None else schema)
        case LarkAnswer(text):
            return lark.nested(text)
        case RegexAnswer(pattern):
            return lark.regex(pattern)
        case ChoiceAnswer(choices):
            return " | ".join(map(lark.literal, choices))
        case FreeAnswer():
            return lark.free_text()
        case _:
            assert_never(demand)


class _Answer:
    """Reads one answer: reasoning, message and calls, in any order."""

    def __init__(
        self,
        reader: MarkupReader,
        writer: PartsWriter,
        context: AnswerContext,
        *,
        tools: ToolMarkup | None,
        reasoning: ReasoningMarkup | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._tools = tools
        self._calls = CallReading(reader, writer, context.tools)
        self._starts = reasoning.starts if reasoning else ()
        self._reasoning = reasoning
        openers = tools.openers if tools else ()
        self._around_message = reasoning.around_message if reasoning else ()
        self._after_message = Markers(openers + self._starts + self._around_message)
        self._ending_openers = openers if tools and tools.ends_reasoning else ()
        if reasoning and reasoning.is_open(context.prompt_end):
            self._begin_reasoning(reasoning.start_in(context.prompt_end))

    def read(self) -> Generator[None, None, None]:
        """Read all of the answer."""
        try:
            while True:
                yield from self._read_section()
        except AnswerEnded:
            self._writer.end()

    def _read_section(self) -> Reading[None]:
        """Read text up to the next marker, and what the marker begins."""
        writer = self._writer
        if writer.section == "reasoning":
            marker = yield from self._reader.until(self._after_reasoning, writer.write)
            if marker in self._ends:
                writer.begin_section("message")
                return
        else:
            if (yield from self._calls_start_here()):
                yield from self._read_calls("")
                return
            marker = yield from self._reader.until(self._after_message, writer.write)
            if marker in self._around_message:
                return
            if marker in self._starts:
                if writer.has_text:  # the message mentions the marker
                    writer.write(marker)
                else:
                    self._begin_reasoning(marker)
                return
        yield from self._read_calls(marker)

    def _begin_reasoning(self, start: str) -> None:
        assert self._reasoning is not None
        self._writer.begin_section("reasoning")
        self._ends = self._reasoning.ends_of(start)
        self._after_reasoning = Markers(self._ends + self._ending_openers)

    def _calls_start_here(self) -> Reading[bool]:
        """Return whether the message has no text yet and continues with a character that begins calls without a marker."""
        starters = self._tools.starters if self._tools else ""
        while starters and not self._writer.has_text:
            following = yield from self._reader.peek()
            if following in starters:
                return True
            if following not in SPACE:
                break
            self._writer.write(self._reader.take(1))
        return False

    def _read_calls(self, marker: str) -> Reading[None]:
        assert self._tools is not None
        tools = self._tools
        yield from self._calls.run(marker, lambda calls: tools.read(calls, marker))
