"""`GrammarCompiler`: compiles the grammars of requests on a thread of its own. Clients take turns, and each client's most recent
grammars are cached.

Most grammars compile in milliseconds and the largest take a second, so neither an event loop nor an engine step may wait for one. A
request enters the scheduler's queue when its grammar is ready; other requests run meanwhile.

Compiling takes CPU time from the steps. So a client that has compiled for more than `BURST_S` gets only `SHARED_CPU` of one core on
average while other clients have requests: after a text that took 1 s, its next text waits up to 10 s. What a client compiled before
that, while it was alone, adds nothing to this wait.

    compiler.begin(owner, text)                          a request arrives
    for owner, matcher, error in compiler.take_ready():  once per step
        compiler.hold(owner, text)                       the request runs with its matcher
    compiler.cancel(owner)                               the request has ended, in any state
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Generic, NamedTuple, TypeVar

from transom_core.errors import RequestError
from transom_core.fair_cache import CLIENT_SHARE, FairCache
from transom_core.grammar.compile_grammar import compile_grammar
from transom_core.grammar.compile_queue import CompileJob, CompileQueue
from transom_core.grammar.grammars_in_use import MAX_BYTES as IN_USE_BYTES, GrammarsInUse
from transom_core.grammar.matcher import GrammarMatcher
from transom_core.grammar.vocabulary import GrammarVocabulary

CACHE_BYTES = 256 << 20  # of all cached grammars
MAX_COMPILED_BYTES = int(CACHE_BYTES * CLIENT_SHARE)  # what the cache keeps of a client; `GrammarChecker` refuses more
TIMEOUT_S = 30.0  # of one grammar; routers allow less (`GrammarChecker`), so only an unchecked grammar takes so long
# Of the compiler's thread: a third of the CPU share of a thread that computes steps; it holds the GIL at times.
NICENESS = 5
SHARED_CPU = 0.1
BURST_S = 1.0  # of CPU time
RECENTLY_S = 1.0  # clients that had requests so recently count as present: requests of one client often have gaps
_MAX_CLIENTS = 1024  # of which it is known when they may compile again
TIMEOUT_KEPT_S = 60.0  # how long such a refusal is cached, since a busy machine may have been the cause
# The bytes that a compiled grammar counts in the cache: at least `_LEAST_BYTES`, which bounds the number of small grammars. If no
# router has measured its memory, `_BYTES_PER_TEXT_BYTE` for each byte of its text: schemas take 110 to 380. Answers add lexer
# states, which all matchers of a grammar share: up to 1,000 bytes for each byte of a schema (100 optional strings), and 12 MiB at
# the library's limit.
_LEAST_BYTES = 1 << 20
_BYTES_PER_TEXT_BYTE = 400
_STATE_BYTES_PER_TEXT_BYTE = 1000
_MAX_STATE_BYTES = 12 << 20

Owner = TypeVar("Owner")


class CompiledGrammar(NamedTuple, Generic[Owner]):
    """What a request (the owner) gets for its grammar: a matcher that has consumed its resumed output, or an error."""

    owner: Owner
    matcher: GrammarMatcher | None
    error: RequestError | None


class GrammarCompiler(Generic[Owner]):
    """Compiles grammars; the engine's thread calls it. The compiler's own thread starts with the first grammar.

    `seconds` is the time that compiling took; `num_compiled` and `num_cached` count the grammars that were compiled, and those that
    were found in the cache. Errors are cached too, so that a client that sends a broken schema again gets its error at once.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        *,
        cache_bytes: int = CACHE_BYTES,
        in_use_bytes: int = IN_USE_BYTES,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        has_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """The compiler's thread calls `make_vocabulary`, once, and `has_others`: whether several clients have requests."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._timeout_s, self._clock, self._has_others = timeout_s, clock, has_others
        self._others_at_s = float("-inf")  # when several clients were seen last
        # client -> when it may compile again, if there are others
        self._waits_until_s: FairCache[str, float] = FairCache(_MAX_CLIENTS, clock=clock)
        self._entries: FairCache[str, GrammarMatcher | RequestError] = FairCache(cache_bytes, clock=clock)  # by text
        self._changed = threading.Condition()  # guards everything below, and the entries
        self._jobs: CompileQueue[Owner, GrammarMatcher | RequestError] = CompileQueue(self._entries.get)
        self._in_use: GrammarsInUse[Owner] = GrammarsInUse(in_use_bytes)
        self._running: CompileJob[Owner] | None = None
        self._running_since_s = 0.0
        self._is_replaying = False  # the running job's grammar is compiled, and its matcher consumes the resumed output
        self._ready: list[CompiledGrammar[Owner]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.seconds = 0.0
        self.num_compiled = 0
        self.num_cached = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory of the cached grammars, as far as it was measured."""
        return self._entries.num_bytes

    @property
    def is_busy(self) -> bool:
        """Return whether a grammar is being compiled, waits to be compiled, or is ready to be taken."""
        with self._changed:  # between two of these a grammar is in none of them
            return bool(self._jobs or self._running or self._ready)

    def check_room(self, client: str, text: str) -> None:
        """Check that one more text of this client may wait; raises `Overloaded`."""
        with self._changed:
            self._jobs.check_room(client, text)

    def begin(
        self,
        owner: Owner,
        text: str,
        resumed_output_ids: Sequence[int] = (),
        *,
        num_bytes: int = 0,
        client: str = "",
        weight: float = 1.0,
    ) -> None:
        """Have a request's grammar compiled; `take_ready` returns the outcome. Clients take turns by their weights.

        `num_bytes` is the memory that the compiled grammar takes, as a router measured it; 0 if that is unknown.
        """
        job = CompileJob(
            owner=owner,
            text=text,
            client=client,
            weight=weight,
            num_bytes=num_bytes,
            resumed_output_ids=tuple(resumed_output_ids),
        )
        with self._changed:
            if self._thread is None:
                self._start()
            self._jobs.add(job)
            self._changed.notify_all()

    def hold(self, owner: Owner, text: str, *, num_bytes: int = 0, client: str = "") -> None:
        """Note that a request holds its compiled grammar, until `cancel`."""
        with self._changed:
            self._in_use.hold(owner, client, text, num_bytes or _BYTES_PER_TEXT_BYTE * len(text))

    def cancel(self, owner: Owner) -> None:
        """Forget a request that has ended. Its grammar is not compiled if no other request waits for it and it has not begun."""
        with self._changed:
            self._jobs.cancel(owner)
            self._in_use.release(owner)
            self._changed.notify_all()  # there may be memory for another grammar now

    def forget(self, text: str, failed: GrammarMatcher) -> None:
        """Drop a text from the cache if it still has the grammar of the matcher that failed.

        The answers of that grammar have made all lexer states that the library allows it, so each further answer would fail; the
        next one gets a new grammar. Other answers that fail with the old one leave the new one alone.
        """
        with self._changed:
            cached = self._entries.get(text)
            if isinstance(cached, GrammarMatcher) and cached.shares_grammar(failed):
                self._entries.remove(text)

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, for `seconds` at most; return at once if none is being compiled."""
        with self._changed:
            if not self._ready and (self._jobs or self._running):
                self._changed.wait(seconds)

    def take_ready(self) -> list[CompiledGrammar[Owner]]:
        """Return the grammars that have become ready since the last call; an error for one that has exceeded the time limit."""
        if not self.is_busy:
            return []
        with self._changed:
            if self._running is not None and self._clock() - self._running_since_s > self._timeout_s:
                self._give_up(self._running)
            ready, self._ready = self._ready, []
            return ready

    def close(self) -> None:
        """End the thread after the grammar that it compiles now; idempotent."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="transom-grammar", daemon=True)
        self._thread.start()

    def _give_up(self, job: CompileJob[Owner]) -> None:
        """Abandon the thread, which cannot be interrupted and may never finish; a new thread compiles the next grammars."""
        error = RequestError(
            f"The grammar of the answer cannot be used: compiling it takes more than {self._timeout_s:g} s; send a smaller schema.",
            param="grammar",
        )
        self._keep(job, error, keep_s=TIMEOUT_KEPT_S)
        self._jobs.charge(job, self._timeout_s)
        if self._is_replaying:
            self._ready.append(CompiledGrammar(job.owner, None, error))
        else:
            self._jobs.compiled(job, error)
        self._running = None
        self._start()

    def _run(self) -> None:
        """Give requests the outcomes that are known; if none is, compile the next text. Runs on the compiler's thread.

        The thread ends when `_give_up` has replaced it: `self._thread` is then another thread.
        """
        me = threading.current_thread()
        if sys.platform == "linux":  # elsewhere a priority is a process's
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS + os.getpriority(os.PRIO_PROCESS, 0))  # 0: this thread
        compiled_for: CompileJob[Owner] | None = None  # the last request whose text was not in the cache
        while self._wait_for_job(me):
            with self._changed:
                known = self._jobs.next_known()
                job = self._jobs.next_job(self._may_compile) if known is None else known[0]
                if job is None:  # it was cancelled, or `_may_compile` no client's
                    if self._jobs and not self._is_closed and self._thread is me:
                        self._changed.wait(RECENTLY_S / 4)
                    continue
                self._running, self._running_since_s, self._is_replaying = job, self._clock(), known is not None
            begin_s = thread_time()
            outcome = self._compile(job) if known is None else _matcher_for(job, known[1])
            with self._changed:
                if self._thread is not me:
                    return
                self._running = None
                self._charge(job, thread_time() - begin_s)
                if known is None:
                    self._jobs.compiled(job, outcome)
                    compiled_for = job
                    continue
                if job is not compiled_for:
                    self.num_cached += 1
                self._entries.get(job.text)  # marks the cache's entry as recently used
                matcher, error = (None, outcome) if isinstance(outcome, RequestError) else (outcome, None)
                self._ready.append(CompiledGrammar(job.owner, matcher, error))
                self._changed.notify_all()

    def _charge(self, job: CompileJob[Owner], cpu_s: float) -> None:
        """Charge a client for the CPU time of its grammar: in its turns, and by when it may compile again beside others."""
        self._jobs.charge(job, cpu_s)
        now_s, burst_s = self._clock(), BURST_S / SHARED_CPU
        until_s = max(now_s - burst_s, self._waits_until_s.get(job.client) or 0.0) + cpu_s / SHARED_CPU
        # A client alone never waits, so its debt would grow with each text. It owes a burst at most, or its last text if that is
        # more.
        until_s = min(until_s, now_s + max(burst_s, cpu_s / SHARED_CPU))
        self._waits_until_s.put(job.client, until_s, num_bytes=1, client=job.client)

    def _may_compile(self, job: CompileJob[Owner]) -> bool:
        """Return whether a client's turn is now: beside others it may have to wait, and grammars in use may leave no memory."""
        now_s = self._clock()
        self._others_at_s = now_s if self._has_others() else self._others_at_s
        if now_s - self._others_at_s < RECENTLY_S and now_s < (self._waits_until_s.get(job.client) or now_s):
            return False
        return self._in_use.has_room(job.client, job.text, job.num_bytes or _BYTES_PER_TEXT_BYTE * len(job.text))

    def _wait_for_job(self, me: threading.Thread) -> bool:
        """Wait until a request waits for its grammar; False if this thread is to end."""
        with self._changed:
            while self._thread is me and not self._is_closed and not self._jobs:
                self._changed.wait()
            return self._thread is me and not self._is_closed

    def _compile(self, job: CompileJob[Owner]) -> GrammarMatcher | RequestError:
        """Compile a job's text. Cache the outcome, unless the error was unexpected or the thread was abandoned meanwhile."""
        begin_s = time.perf_counter()
        compiled: GrammarMatcher | RequestError
        is_kept = True
        try:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            compiled = compile_grammar(job.text, self._vocabulary)
        except RequestError as error:
            compiled = error
        except Exception as error:  # an unexpected error must end only the requests with this text
            compiled, is_kept = _unusable(error), False
        with self._changed:
            self.seconds += time.perf_counter() - begin_s
            self.num_compiled += 1
            if is_kept and self._thread is threading.current_thread():
                self._keep(job, compiled)
        return compiled

    def _keep(
        self, job: CompileJob[Owner], compiled: GrammarMatcher | RequestError, *, keep_s: float = float("inf")
    ) -> None:
        """Cache the outcome of a job's text; it counts for the job's client."""
        num_bytes = len(job.text)
        if isinstance(compiled, GrammarMatcher):
            compiled_bytes = job.num_bytes or _BYTES_PER_TEXT_BYTE * len(job.text)
            state_bytes = min(_MAX_STATE_BYTES, _STATE_BYTES_PER_TEXT_BYTE * len(job.text))
            # A grammar that fits into a client's share is cached, even if its states do not fit in as well.
            share = int(self._entries.max_bytes * CLIENT_SHARE) - num_bytes
            num_bytes += max(_LEAST_BYTES, compiled_bytes, min(compiled_bytes + state_bytes, share))
        self._entries.put(job.text, compiled, num_bytes=num_bytes, client=job.client, keep_s=keep_s)


def _matcher_for(job: CompileJob[Owner], compiled: GrammarMatcher | RequestError) -> GrammarMatcher | RequestError:
    """Return a matcher for one request, which has consumed the request's resumed output; or the error that ends the request."""
    if isinstance(compiled, RequestError):
        return compiled
    try:
        matcher = compiled.copy()
        if job.resumed_output_ids:
            matcher.replay(job.resumed_output_ids)
    except RequestError as error:
        return error
    except Exception as error:
        return _unusable(error)
    return matcher


def _unusable(error: Exception) -> RequestError:
    return RequestError(f"The grammar of the answer cannot be used: {error}.", param="grammar")
