"""`GrammarChecker`: finds out at a bounded cost whether a grammar can be used, before its request is accepted.

For some schemas of a hundred bytes the grammar library takes minutes or gigabytes, in code that nothing can interrupt (two
`multipleOf` with a large common multiple, many `anyOf` inside `allOf`). So a router compiles each grammar in a child process first,
which the limits of time and memory end. The child also measures the memory of the compiled grammar: one that takes more than
`MAX_COMPILED_BYTES` is refused, and for any other grammar the request tells the worker this number.

A client whose checks have taken more than `PATIENT_S` of CPU time lately (of its seconds a half counts after `HALF_LIFE_S`)
waits for a child that hardly runs where a CPU has anything else to do, and for one check after the other: so its checks take no
time from steps. A check that has begun runs to its end if its request has left: the next child would cost more than most checks.

The verdict on a grammar is cached by the text's digest, because agents send the same tools with every request. A refusal because of
the limits is cached for a minute only, since a busy machine may be the cause.

The child's first message (`limited_children`) has the tokenizer, and each task has a grammar:

    {"tokenizer": "{...}", "eos_token_ids": [2]}
    {"grammar": "start: ..."}

The answer is `{"num_bytes": 1048576}` if the grammar can be used, with the memory that the compiled grammar takes;
`{"refused": "The grammar of the answer cannot be used: ..."}` if not; both with the check's CPU time, `"cpu_s": 0.02`; or
`{"too_large": "..."}`, which counts as the limit of CPU time.

A compiled grammar takes as much memory as the child's resident memory grows by; before each of the two measurements, malloc returns
the pages that it does not need. The length of a text says little about its memory: `(a{1000}){1000}` takes 50 MiB, and a schema
with 10,000 words takes 4 MiB.
"""

import hashlib
import resource
import sys
import threading
import time
from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

from tokenizers import Tokenizer as RustTokenizer

from transom_core.errors import RequestError
from transom_core.fair_cache import FairCache
from transom_core.grammar.compile_grammar import MAX_GRAMMAR_BYTES, compile_grammar
from transom_core.grammar.compiler import MAX_COMPILED_BYTES
from transom_core.grammar.vocabulary import GrammarVocabulary
from transom_core.limited_children import LimitedChildren, Message, Respond
from transom_core.machine.host_memory import return_freed_memory
from transom_core.text.tokenizer import Tokenizer

CPU_S = 5.0  # for one grammar; an object with 5,000 optional properties takes 1.7 s
MEMORY_BYTES = 1 << 30  # for one grammar
KEPT_BYTES = 8 << 20  # of all verdicts; a client may fill a quarter of it, which holds some 6,000
KEPT_ENTRY_BYTES = 300  # of one verdict: the digest, and an entry of the cache
KEPT_LIMIT_S = 60.0  # how long a refusal because of the limits of time and memory is cached
PATIENT_S = 1.0
HALF_LIFE_S = 30.0
_MAX_CLIENTS = 1024  # whose time is known; with more, the least of it is forgotten
_TOO_LARGE = (
    "The grammar of the answer cannot be used: {}; send a smaller schema, with fewer alternatives, shorter repetitions and smaller "
    "numbers."
)


class CheckedGrammar(NamedTuple):
    """A grammar that can be used: its text, and the bytes of memory that it takes when it is compiled."""

    text: str
    num_bytes: int


class Verdict(NamedTuple):
    """The result of checking a grammar: what is wrong with it ("" if nothing is), and the bytes that it takes when compiled."""

    problem: str
    num_bytes: int

    def apply(self, grammar: str, *, param: str | None) -> CheckedGrammar:
        """Return the grammar, of which this is the verdict, with its size.

        Raises:
            RequestError: the grammar cannot be used. `param` is the request field that the error names.
        """
        if self.problem:
            raise RequestError(self.problem, param=param)
        return CheckedGrammar(grammar, self.num_bytes)


class GrammarChecker:
    """Checks grammars in child processes; any thread may call it.

    `check` waits for a child, so an event loop asks `known` first, and calls `check` on a thread. The first check starts a child,
    which takes a second or two to read the vocabulary; `warm_up` does that before there are requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        cpu_s: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s = cpu_s
        self._children = LimitedChildren(
            __name__,
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            first=lambda: {"tokenizer": tokenizer.to_json(), "eos_token_ids": list(tokenizer.eos_token_ids)},
        )
        self._lock = threading.Lock()
        # (digest, whether the check is patient) -> set when a child has answered
        self._asking: dict[tuple[bytes, bool], threading.Event] = {}
        self._clock = clock
        self._taken: dict[str, tuple[float, float]] = {}  # client -> (CPU seconds of its checks, at which time)
        self.kept: FairCache[bytes, Verdict] = FairCache(KEPT_BYTES, clock=clock)  # by digest

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the child processes that run."""
        return self._children.pids

    def warm_up(self) -> None:
        """Start a child, unless there is one."""
        if not self._children.pids:
            self.check('start: "a"')

    def known(self, grammar: str) -> Verdict | None:
        """Return the cached verdict on a grammar, without waiting; None if there is none."""
        with self._lock:
            return self.kept.get(_digest(grammar))

    def is_patient(self, client: str) -> bool:
        """Return whether a client's next check should be a patient task (`limited_children`)."""
        with self._lock:
            return self._taken_s(client) > PATIENT_S

    def check(
        self, grammar: str, *, param: str | None = "grammar", client: str = "", is_patient: bool = False
    ) -> CheckedGrammar:
        """Return the grammar with its size in memory. A new verdict counts for `client` in the cache.

        `is_patient`: a new grammar is a patient task. The caller decides that with `is_patient(client)`, together with the thread
        that waits, so that patient tasks never take the threads of others. Of two equal texts only one is checked; but a check
        that is not patient never waits for a patient one.

        Raises:
            RequestError: the grammar cannot be used; the message says why. `param` is the request field that the error names.
        """
        digest = _digest(grammar)
        with self._lock:
            verdict = self.kept.get(digest)
            asking = self._asking.get((digest, False)) or self._asking.get((digest, is_patient))
            if verdict is None and asking is None:
                self._asking[digest, is_patient] = threading.Event()
        if verdict is None and asking is not None:  # another thread asks about the same text: use what it finds
            asking.wait()
            return self.check(grammar, param=param, client=client, is_patient=is_patient)
        if verdict is None:
            try:
                verdict = self._ask(grammar, digest, client, is_patient=is_patient)
            finally:
                with self._lock:
                    self._asking.pop((digest, is_patient)).set()
        return verdict.apply(grammar, param=param)

    def close(self) -> None:
        """End the child processes; idempotent."""
        self._children.close()

    def _taken_s(self, client: str) -> float:
        seconds, at_s = self._taken.get(client, (0.0, 0.0))
        return float(seconds * 0.5 ** ((self._clock() - at_s) / HALF_LIFE_S))

    def _ask(self, grammar: str, digest: bytes, client: str, *, is_patient: bool) -> Verdict:
        """Have a child check a grammar, and cache its verdict."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            return Verdict(
                f"The grammar of the answer cannot be used: it has {len(grammar)} characters and {MAX_GRAMMAR_BYTES} bytes are "
                "allowed; send a smaller schema.",
                0,
            )
        answer = self._children.ask({"grammar": grammar}, is_patient=is_patient)
        with self._lock:
            self._taken[client] = (self._taken_s(client) + answer.get("cpu_s", self._cpu_s), self._clock())
            if len(self._taken) > _MAX_CLIENTS:
                self._taken = dict(
                    nlargest(_MAX_CLIENTS // 2, self._taken.items(), key=lambda one: self._taken_s(one[0]))
                )
        if "unprepared" in answer:
            return Verdict(f"Grammars cannot be used with this model's vocabulary: {answer['unprepared']}.", 0)
        if "killed" in answer:  # the child was killed from outside, twice, which says nothing about the grammar
            return Verdict(f"The grammar of the answer could not be checked: {answer['killed']}. Try again.", 0)
        verdict, keep_s = Verdict(answer.get("refused", ""), answer.get("num_bytes", 0)), float("inf")
        if "too_large" in answer:
            verdict, keep_s = Verdict(_TOO_LARGE.format(answer["too_large"]), 0), KEPT_LIMIT_S
        elif verdict.num_bytes > MAX_COMPILED_BYTES:
            reason = f"it takes {verdict.num_bytes >> 20} MiB of memory and {MAX_COMPILED_BYTES >> 20} are allowed"
            verdict = Verdict(_TOO_LARGE.format(reason), 0)
        num_bytes = KEPT_ENTRY_BYTES + sys.getsizeof(verdict.problem)
        with self._lock:
            self.kept.put(digest, verdict, num_bytes=num_bytes, client=client, keep_s=keep_s)
        return verdict


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def prepare(first: Message) -> Respond:
    """Read the vocabulary from the first message, in a child, and return the function that does the child's tasks."""
    rust = RustTokenizer.from_str(first["tokenizer"])
    eos_token_ids = tuple(first["eos_token_ids"])
    tokenizer = Tokenizer(rust, named_tokens={}, chat_template=None, eos_token_ids=eos_token_ids)
    vocab_size = 1 + max(rust.get_vocab(with_added_tokens=True).values())
    vocabulary = GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    # The first grammar makes the library slice the vocabulary, which must not count as a task's time or memory.
    compile_grammar("start: /(.|\\n)*/", vocabulary)

    def respond(task: Message) -> Message:
        before, begin_s = _resident_bytes(), time.process_time()
        answer: Message
        try:
            matcher = compile_grammar(task["grammar"], vocabulary)
            answer = {"num_bytes": max(0, _resident_bytes() - before)}
            del matcher
        except RequestError as error:
            answer = {"refused": str(error)}
        return {**answer, "cpu_s": time.process_time() - begin_s}

    return respond


def _resident_bytes() -> int:
    """Return the bytes of memory that this process uses, without what malloc keeps for later."""
    return_freed_memory()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
