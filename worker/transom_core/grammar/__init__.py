"""Grammars: which tokens an answer may continue with. The library `llguidance` parses them and computes the masks.

A grammar is a text in llguidance's dialect of Lark, with JSON schemas as `%json {...}`, regular expressions, and special tokens as
`<|name|>` or `<[id]>`. Routers write one grammar for a whole answer, markup included; a worker knows nothing but the grammar.

    vocabulary   the model's tokens as bytes, as the library needs them
    compile      a text becomes a `GrammarMatcher`, within limits of size
    compiler     compiles on a thread of its own, and keeps the most recent grammars
    matcher      one answer's place in its grammar
    masks        the tokens that each of many answers may continue with, computed in parallel
    checker      compiles texts from outside in a child process first, under limits of time and memory
"""

from transom_core.grammar.checker import CheckedGrammar, GrammarChecker
from transom_core.grammar.compile_grammar import MAX_GRAMMAR_BYTES, compile_grammar
from transom_core.grammar.compiler import CompiledGrammar, GrammarCompiler
from transom_core.grammar.masks import GrammarMasks
from transom_core.grammar.matcher import GrammarMatcher
from transom_core.grammar.vocabulary import GrammarVocabulary

__all__ = [
    "MAX_GRAMMAR_BYTES",
    "CheckedGrammar",
    "CompiledGrammar",
    "GrammarChecker",
    "GrammarCompiler",
    "GrammarMasks",
    "GrammarMatcher",
    "GrammarVocabulary",
    "compile_grammar",
]
