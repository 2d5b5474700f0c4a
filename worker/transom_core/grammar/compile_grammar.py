"""Compiles the text of a grammar, within limits of size, and says what is wrong with a text that cannot be compiled.

The limits bound the cost of one grammar: its memory, the time to compile it, and the time to compute one mask (the tokens allowed
next). A text that takes too much memory or time to compile is refused; an answer with a mask that takes too long ends with an error
(`GrammarMatcher`). The limits of the library, llguidance, do not count some of its work (combining `multipleOf` numbers and the
disjoint names of `patternProperties`), so a client's grammar is compiled in a child process first (`GrammarChecker`).
"""

import re

from llguidance import LLMatcher, LLParserLimits

from transom_core.errors import RequestError
from transom_core.grammar.matcher import GrammarMatcher
from transom_core.grammar.vocabulary import GrammarVocabulary

MAX_GRAMMAR_BYTES = 1 << 20
MAX_REASON_CHARS = 300  # the library quotes the text that it refuses, which may have a million characters

# docs/structured_output.md has the measurements that these comments quote.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,  # work on the regular expressions: a schema with 10,000 enumerated strings takes 200,000
    max_items_in_row=5_000,  # parser items at one position: 1,200 optional properties reach it; their mask takes 10 ms
    step_lexer_fuel=100_000,  # work of the lexer for one mask: about 7 ms
    step_max_items=20_000,  # items that the parser makes for one mask: about 1 ms
    max_lexer_states=20_000,  # lexer states of all answers of one compiled grammar together: about 600 bytes each
    max_grammar_size=50_000,  # symbols of the grammar
    verbose_errors=False,
)
_UNSUPPORTED_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_POSITION = re.compile(r"^at \d+\(\d+\): ")


def compile_grammar(text: str, vocabulary: GrammarVocabulary) -> GrammarMatcher:
    """Return a matcher at the beginning of the grammar, after computing its first mask.

    The library releases the GIL, except while it reads the text.

    Raises:
        RequestError: the text is too long, is not a grammar, needs something unsupported, exceeds a limit, or allows no answer.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise _refused("it holds half of a surrogate pair (such as \\ud83d alone); send valid Unicode") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _refused(f"it has {num_bytes} bytes and {MAX_GRAMMAR_BYTES} are allowed; send a smaller schema")
    library_matcher = LLMatcher(vocabulary.library_tokenizer, text, log_level=0, limits=_LIMITS)
    if library_matcher.is_error():
        raise _refused(_reason(library_matcher.get_error()))
    matcher = GrammarMatcher(library_matcher, vocabulary)
    matcher.warm_up()
    if matcher.has_failed:
        raise _refused("it allows no answer at all, or is too complex for the first token")
    return matcher


def _refused(reason: str) -> RequestError:
    if len(reason) > MAX_REASON_CHARS:
        reason = reason[:MAX_REASON_CHARS] + " ..."
    return RequestError(f"The grammar of the answer cannot be used: {reason}.", param="grammar")


def _reason(error: str) -> str:
    """Return the library's message in one line, without its position in the text: the router wrote the text, not the client."""
    if error.startswith("panic"):
        return "it is too large; send a smaller schema"
    if keys := _UNSUPPORTED_KEYS.search(error):
        return f"JSON Schema's {keys[1]} is not supported; leave it out"
    lines = [line.strip() for line in _POSITION.sub("", error).split("\n   1 | ")[0].splitlines()]
    return "; ".join(line for line in lines if line and line != "<non-verbose/>").rstrip(". ;")
