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

DEFAULT_TOOL_PARSER = "hermes"  # of the prompt that `transom_core.text.default_tool_prompt` writes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMarkup:
    """The format of answers, and the names of its two parsers; None: the model has no tool calls, or no reasoning.

    With `auto_tool_choice` the model may decide whether it calls a tool.
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
        """The markup with these parsers: NO_PARSER leaves such markup as text, and those that are not given follow from the
        model's type and chat template.

        Raises:
            ConfigError: there is no parser of a name, or the chat template asks for another markup.
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
        """How answers are read, for the log."""
        tools, reasoning = self.tool_parser or "ordinary text", self.reasoning_parser or "ordinary text"
        return f"tool calls as {tools}, reasoning as {reasoning}"

    def context(self, options: AnswerOptions, *, prompt_end: str) -> AnswerContext:
        """How the answers to a request are read. `prompt_end` is the end of the rendered prompt."""
        return AnswerContext(
            tools=options.tools if options.tools_demand else (),
            parses_tools=options.tools_demand is not None,
            parses_reasoning=self.reasoning_parser is not None,
            prompt_end=prompt_end,
        )

    def check_demand(self, demand: ToolsDemand | None) -> None:
        """Check that the model can call tools, where a request wants calls.

        Raises:
            RequestError: it cannot, or only where the request says that it must.
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
"""The markup of text completions: none, all text is the answer."""
