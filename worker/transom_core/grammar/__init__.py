"""Constrains answers by grammars: finds the tokens with which an answer may continue, with the library `llguidance`.

A grammar is a text in llguidance's dialect of Lark, with JSON schemas as `%json {...}`, regular expressions, and special tokens as
`<|name|>` or `<[id]>`. Routers write one grammar for a whole answer, markup included; a worker knows nothing but the grammar.

    dialects          converts grammars that clients send (GBNF, structural tags) to Lark
    checker           compiles a client's grammar in a child process first, under limits of time and memory
    vocabulary        the model's tokens as bytes, for the library
    compile_grammar   makes a `GrammarMatcher` of a text, within limits of size
    compiler          compiles on a thread of its own, and caches the most recent grammars
    compile_queue     the requests that wait for the compiler
    grammars_in_use   the memory of the grammars that running requests have
    matcher           one answer's position in its grammar
    masks             the tokens with which each of many answers may continue, computed in parallel
"""

from transom_core.grammar.checker import CheckedGrammar, GrammarChecker
from transom_core.grammar.compile_grammar import MAX_GRAMMAR_BYTES, compile_grammar
from transom_core.grammar.compiler import CompiledGrammar, GrammarCompiler
from transom_core.grammar.masks import GrammarMasks
from transom_core.grammar.matcher import GrammarMatcher
from transom_core.grammar.vocabulary import GrammarVocabulary

__all__ = [
    "MAX_GRAMMAR_BYTES", "CheckedGrammar", "CompiledGrammar", "GrammarChecker", "GrammarCompiler", "GrammarMasks",
    "GrammarMatcher", "GrammarVocabulary", "compile_grammar",
]  # fmt: skip
