"""`AnswerMarkup`: the markup in which the served model writes reasoning and tool calls, chosen once when a router starts."""

from __future__ import annotations

from dataclasses import dataclass

from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_core.config import NO_PARSER
from transom_core.errors import ConfigError, RequestError
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext, ToolsDemand
from transom_core.text.markup.detection import detect
from transom_core.text.markup.formats import answer_format
from transom_core.text.tokenizer import Tokenizer

DEFAULT_TOOL_PARSER = "hermes"  # reads the calls that the prompt of `transom_core.text.default_tool_prompt` asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMarkup:
    """The format of a model's answers, and the names of its tool-call and reasoning parsers.

    A parser's name is None if the model writes no such markup, or if the server leaves it in the text. With `auto_tool_choice` a
    request may let the model decide whether it calls a tool.
    """

    format: AnswerFormat
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    auto_tool_choice: bool = True

    @classmethod
    def choose(
        cls,
        tokenizer: Tokenizer,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        auto_tool_choice: bool = True,
    ) -> AnswerMarkup:
        """Return the markup with the given parsers. NO_PARSER leaves that kind of markup in the text; a parser that is not given is
        derived from the model's type and chat template.

        Raises:
            ConfigError: no parser has the given name, or the chat template asks for another markup.
        """
        found_tool_parser, found_reasoning_parser = detect(tokenizer.model_type, tokenizer.chat_template, tokenizer)
        if tokenizer.chat_template is not None and not tokenizer.template_knows_tools:
            found_tool_parser = DEFAULT_TOOL_PARSER
            if tool_parser not in (None, NO_PARSER, DEFAULT_TOOL_PARSER):
                raise ConfigError(
                    f"--tool-call-parser is {tool_parser!r}, and the model's chat template knows no tools; the prompt that "
                    f"describes them instead asks for calls as {DEFAULT_TOOL_PARSER!r} reads them. Leave the flag out."
                )
        tool_parser = _parser(tool_parser or found_tool_parser)
        reasoning_parser = _parser(reasoning_parser or found_reasoning_parser)
        return cls(
            format=answer_format(tool_parser, reasoning_parser),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            auto_tool_choice=auto_tool_choice,
        )

    @property
    def description(self) -> str:
        """Return one line for the log that says how answers are parsed."""
        tools, reasoning = self.tool_parser or "ordinary text", self.reasoning_parser or "ordinary text"
        return f"tool calls as {tools}, reasoning as {reasoning}"

    def context(self, options: AnswerOptions, *, prompt_end: str) -> AnswerContext:
        """Return what the parser has to know of a request to read its answers. `prompt_end` is the end of the rendered prompt."""
        return AnswerContext(
            tools=options.tools if options.tools_demand else (),
            parses_tools=options.tools_demand is not None,
            parses_reasoning=self.reasoning_parser is not None,
            prompt_end=prompt_end,
        )

    def check_demand(self, demand: ToolsDemand | None) -> None:
        """Check that this server supports the tool calls that a request asks for.

        Raises:
            RequestError: the model's calls have no parser, or `tool_choice` is "auto" and the server allows only required calls.
        """
        if demand is None:
            return
        if self.tool_parser is None:
            raise RequestError(
                "tools need a parser for this model's tool calls, and its chat template shows none that is known; start the "
                "server with --tool-call-parser, or leave tools out.",
                param="tools",
            )
        if demand.mode == "auto" and not self.auto_tool_choice:
            raise RequestError(
                'tool_choice is "auto", which this server does not allow; send "required", a function or "none", or start the '
                "server with --enable-auto-tool-choice.",
                param="tool_choice",
            )


def _parser(name: str | None) -> str | None:
    return None if name == NO_PARSER else name


PLAIN = AnswerMarkup(format=answer_format(None, None))
"""The markup of text completions, which have none: the whole text is the answer."""
