"""`GrammarChecker`: finds out whether a grammar can be used, before a request is accepted, at a bounded cost.

Some schemas of a hundred bytes take the grammar library minutes or gigabytes, in code that nothing can interrupt (two
`multipleOf` with a large common multiple, many `anyOf` inside `allOf`). So a router compiles each grammar in a child process
first, where a limit ends it. What was found is kept by digest: agents send the same tools with every request.
A refusal because of the limits is kept for a minute only, since a busy machine may be why.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable

from transom_core.errors import RequestError
from transom_core.fair_cache import FairCache
from transom_core.grammar.compile_grammar import MAX_GRAMMAR_BYTES
from transom_core.limited_children import LimitedChildren
from transom_core.text.tokenizer import Tokenizer

CPU_S = 5.0  # for one grammar; an object with 5,000 optional properties takes 1.7 s
MEMORY_BYTES = 1 << 30  # for one grammar
KEPT_BYTES = 8 << 20  # a client's quarter has some 6,000 results
KEPT_ENTRY_BYTES = 300  # the digest, and an entry of the cache
KEPT_LIMIT_S = 60.0  # a refusal because of the limits of time and memory


class GrammarChecker:
    """Any thread may call it; `check` waits for the child, so an event loop must not, unless `is_known`.

    The first check starts a child, which takes a second or two to read the vocabulary; `warm_up` does that in time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        cpu_s: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = LimitedChildren(
            "transom_core.grammar.check_process",
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            first=lambda: {"tokenizer": tokenizer.to_json(), "eos_token_ids": list(tokenizer.eos_token_ids)},
        )
        self._lock = threading.Lock()
        self.kept: FairCache[bytes, str] = FairCache(
            KEPT_BYTES, clock=clock
        )  # by digest: what is wrong, empty if nothing is

    @property
    def pids(self) -> tuple[int, ...]:
        """The child processes that run."""
        return self._children.pids

    def warm_up(self) -> None:
        """Start a child, unless there is one."""
        if not self._children.pids:
            self.check('start: "a"')

    def is_known(self, grammar: str) -> bool:
        """Return whether `check` answers at once."""
        with self._lock:
            return self.kept.get(_digest(grammar)) is not None

    def check(self, grammar: str, *, param: str | None = "grammar", client: str = "") -> None:
        """Return if the grammar can be used. What is found counts for `client` in the cache.

        Raises:
            RequestError: it cannot; the message says why, and `param` is the error's.
        """
        digest = _digest(grammar)
        with self._lock:
            problem = self.kept.get(digest)
        if problem is None:
            problem = self._ask(grammar, digest, client)
        if problem:
            raise RequestError(problem, param=param)

    def close(self) -> None:
        """End the child processes; idempotent."""
        self._children.close()

    def _ask(self, grammar: str, digest: bytes, client: str) -> str:
        """Return what is wrong with a grammar; empty if nothing is."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            return (
                f"The grammar of the answer cannot be used: it has {len(grammar)} characters and {MAX_GRAMMAR_BYTES} bytes are "
                "allowed; send a smaller schema."
            )
        answer = self._children.ask({"grammar": grammar})
        if "killed" in answer:  # from outside, twice: that says nothing about the grammar
            return f"The grammar of the answer could not be checked: {answer['killed']}. Try again."
        problem, keep_s = str(answer.get("refused", "")), float("inf")
        if "too_large" in answer:
            problem = (
                f"The grammar of the answer cannot be used: {answer['too_large']}; send a smaller schema, with fewer alternatives "
                "and smaller numbers."
            )
            keep_s = KEPT_LIMIT_S
        num_bytes = KEPT_ENTRY_BYTES + sys.getsizeof(problem)
        with self._lock:
            self.kept.put(digest, problem, num_bytes=num_bytes, client=client, keep_s=keep_s)
        return problem


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
