"""Compiles grammars on trial, in a process of its own, under limits of CPU time and memory (`limited_children`).

The first message has the tokens, and each task a grammar:

    {"tokenizer": "{...}", "eos_token_ids": [2]}
    {"grammar": "start: ..."}

The answer is `{"num_bytes": 1048576}` if the grammar can be used, with the memory that the compiled grammar takes;
`{"refused": "The grammar of the answer cannot be used: ..."}` if not; or `{"too_large": "..."}`.

The memory is measured: what this process has resident grows by it, if malloc gives the pages back that it does not need before and
after compiling. A text says little of it: `(a{1000}){1000}` takes 50 MiB, and a schema with 10,000 words 4 MiB.
"""

from __future__ import annotations

import ctypes
import resource
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from transom_core.errors import RequestError
from transom_core.grammar.compile_grammar import compile_grammar
from transom_core.grammar.vocabulary import GrammarVocabulary
from transom_core.limited_children import serve
from transom_core.text.tokenizer import Tokenizer

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


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
        before = _resident_bytes()
        try:
            matcher = compile_grammar(task["grammar"], self.vocabulary)
        except RequestError as error:
            return {"refused": str(error)}
        num_bytes = max(0, _resident_bytes() - before)
        del matcher
        return {"num_bytes": num_bytes}


def _resident_bytes() -> int:
    """Return the bytes of memory that this process uses, without what malloc keeps for later."""
    if _TRIM is not None:
        _TRIM(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    checks = _Checks()
    serve(checks.respond, prepare=checks.prepare)
