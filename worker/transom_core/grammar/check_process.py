"""Compiles grammars on trial, in a process of its own, under limits of CPU time and memory (`limited_children`).

The first message has the tokens, and each task a grammar:

    {"tokenizer": "{...}", "eos_token_ids": [2]}
    {"grammar": "start: ..."}

The answer is `{}` if the grammar can be used, `{"refused": "The grammar of the answer cannot be used: ..."}` if not, or
`{"too_large": "..."}`.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from transom_core.errors import RequestError
from transom_core.grammar.compile_grammar import compile_grammar
from transom_core.grammar.vocabulary import GrammarVocabulary
from transom_core.limited_children import serve
from transom_core.text.tokenizer import Tokenizer


class _Checks:
    """The vocabulary of this process's parent."""

    vocabulary: GrammarVocabulary

    def prepare(self, first: dict[str, Any]) -> None:
        rust = RustTokenizer.from_str(first["tokenizer"])
        tokenizer = Tokenizer(rust, named_tokens={}, chat_template=None, eos_token_ids=first["eos_token_ids"])
        vocab_size = 1 + max(rust.get_vocab(with_added_tokens=True).values())
        self.vocabulary = GrammarVocabulary(
            tokenizer, vocab_size=vocab_size, eos_token_ids=tuple(first["eos_token_ids"])
        )
        compile_grammar("start: /(.|\\n)*/", self.vocabulary)  # the slices of the vocabulary are made by the first one

    def respond(self, task: dict[str, Any]) -> dict[str, Any]:
        try:
            compile_grammar(task["grammar"], self.vocabulary)
        except RequestError as error:
            return {"refused": str(error)}
        return {}


if __name__ == "__main__":
    checks = _Checks()
    serve(checks.respond, prepare=checks.prepare)
