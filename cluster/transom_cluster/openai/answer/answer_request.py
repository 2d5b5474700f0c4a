"""`AnswerRequest`: how the answer to one request is read and what it is held to, in the model's own markup.

Chat completions, text completions and responses all make an `AnswerOptions` from their bodies, render their prompt, and call
`answer_request`. Example: a chat with `tools` and `tool_choice` "required" gets a grammar that allows the model to think, and
then to write calls of these tools and nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.fair_threads import ClientThreads
from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext
from transom_core.text.markup.parts import AnswerParser
from transom_core.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """How one request's answers are read, and the grammar that they are held to; None: they are free."""

    format: AnswerFormat
    context: AnswerContext
    grammar: str | None = None
    include_reasoning: bool = True

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may have other parts than its message. Otherwise its text goes to the client as it is."""
        return self.context.parses_tools or self.context.parses_reasoning

    def parser(self, tokenizer: Tokenizer) -> AnswerParser:
        """The parser of one choice."""
        return self.format.parser(tokenizer, self.context)


class ChecksGrammars(Protocol):
    """The part of `transom_core.grammar.GrammarChecker` that is needed here."""

    def is_known(self, grammar: str) -> bool:
        """Whether `check` answers at once."""

    def check(self, grammar: str, *, param: str | None) -> None:
        """Raise RequestError if the grammar cannot be used; `param` is the error's."""

    def close(self) -> None:
        """End what the checks need; idempotent."""


async def answer_request(
    markup: AnswerMarkup,
    tokenizer: Tokenizer,
    options: AnswerOptions,
    *,
    prompt_end: str,
    threads: ClientThreads,
    checker: ChecksGrammars,
) -> AnswerRequest:
    """Build the answer's grammar and check it. `prompt_end` is the end of the rendered prompt.

    Raises:
        RequestError: the model's markup has no tool calls, or the demand cannot be held; `param` names the field.
    """
    markup.check_demand(options.tools_demand)
    demand = options.tools_demand
    context = AnswerContext(
        tools=options.tools if demand else (),
        parses_tools=demand is not None,
        parses_reasoning=markup.reasoning_parser is not None,
        prompt_end=prompt_end,
    )

    def write_grammar() -> str | None:
        return markup.format.grammar(tokenizer, context, message=options.form.demand, tools=demand)

    grammar = await threads.run(write_grammar, num_chars=options.num_chars, inline_chars=MAX_INLINE_CHARS)
    if grammar is not None:
        check = functools.partial(checker.check, grammar, param=options.form.param or "tools")
        if checker.is_known(grammar):
            check()
        else:
            await threads.check(check)
    return AnswerRequest(
        format=markup.format, context=context, grammar=grammar, include_reasoning=options.include_reasoning
    )
