"""`answer_grammar`: the grammar that a request's answers are held to, in the model's own markup, checked before a worker sees it.

Example: a chat with `tools` and `tool_choice` "required" gets a grammar that allows the model to think, and then to write calls of
these tools and nothing else.
"""

from __future__ import annotations

import functools
from typing import Protocol

from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.fair_threads import ClientThreads
from transom_cluster.openai.prompt.prompts import MAX_INLINE_CHARS
from transom_cluster.openai.request.answer_options import AnswerOptions
from transom_core.text.markup.context import AnswerContext
from transom_core.text.tokenizer import Tokenizer


class ChecksGrammars(Protocol):
    """The part of `transom_core.grammar.GrammarChecker` that is needed here."""

    def is_known(self, grammar: str) -> bool:
        """Whether `check` answers at once."""

    def check(self, grammar: str, *, param: str | None) -> None:
        """Raise RequestError if the grammar cannot be used; `param` is the error's."""

    def close(self) -> None:
        """End what the checks need; idempotent."""


async def answer_grammar(
    markup: AnswerMarkup,
    tokenizer: Tokenizer,
    options: AnswerOptions,
    context: AnswerContext,
    *,
    threads: ClientThreads,
    checker: ChecksGrammars,
) -> str | None:
    """Write the grammar of a request's answers and check it; None: nothing is demanded of them.

    Raises:
        RequestError: the demand cannot be held; `param` names the field.
    """

    def write_grammar() -> str | None:
        return markup.format.grammar(tokenizer, context, message=options.form.demand, tools=options.tools_demand)

    grammar = await threads.run(write_grammar, num_chars=options.num_chars, inline_chars=MAX_INLINE_CHARS)
    if grammar is not None:
        check = functools.partial(checker.check, grammar, param=options.form.param or "tools")
        if checker.is_known(grammar):
            check()
        else:
            await threads.check(check)
    return grammar
