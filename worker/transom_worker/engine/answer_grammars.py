"""`AnswerGrammars`: holds the answers of one engine to the grammars of their requests.

    begin       a request has come; its grammar is compiled on another thread, and the request is *held* meanwhile
    hold        the grammar is ready: a matcher follows the request's answer from now on
    compute     the answers have a new token: which tokens may come next, for all of them at once
    plan_mask   a plan samples some of these answers: their rows

What beside a grammar ends an answer, and what may not:

- An answer ends by itself where nothing can follow: a finished JSON document needs no end of text.
- End of text is allowed only where the grammar accepts the answer, and with `ignore_eos` nowhere.
- Before `min_tokens`, end of text and `stop_token_ids` are taken out of the mask. Where nothing else is left, an answer that the
  grammar accepts ends (it cannot be longer), and any other is a request that contradicts itself: an error.
- Stop strings and `stop_token_ids` cut an answer where they occur, in the middle of a document as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transom_core.contract import Request
from transom_core.grammar import CompiledGrammar, GrammarCompiler, GrammarMasks, GrammarMatcher, GrammarVocabulary
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.running_request import RunningRequest
from transom_worker.telemetry.worker_state import GrammarStats

COMPILE_WAIT_S = 0.02  # for which a step without anything to compute waits for a grammar at most


class AnswerGrammars:
    """Only the engine's thread calls it."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is the number of logits, `eos_token_ids` are all ids that end an answer."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self.masks = GrammarMasks(vocab_size)
        self.compiler: GrammarCompiler[RunningRequest] = GrammarCompiler(
            lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=tuple(self._eos_token_ids))
        )
        self._num_requests = 0
        self.num_failed = 0  # requests that an error of their grammar has ended

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return self.compiler.is_busy

    def check_room(self, request: Request) -> None:
        """Check that a request's grammar, if it has one, may wait to be compiled; raises `Overloaded`."""
        if request.grammar is not None:
            self.compiler.check_room(request.client, request.grammar)

    def begin(self, running: RunningRequest, grammar: str) -> None:
        """Have the grammar of a request compiled."""
        self._num_requests += 1
        request = running.request
        self.compiler.begin(
            running,
            grammar,
            request.resumed_output_ids,
            num_bytes=request.grammar_bytes,
            client=request.client,
            weight=request.client_weight,
        )

    def take_ready(self, *, may_wait: bool) -> list[CompiledGrammar[RunningRequest]]:
        """Return the grammars that have become ready; where `may_wait`, wait a moment for one that is being compiled."""
        if may_wait:
            self.compiler.wait(COMPILE_WAIT_S)
        return self.compiler.take_ready()

    def hold(self, running: RunningRequest, matcher: GrammarMatcher) -> Exception | None:
        """Hold a request's answer to its grammar from now on; returns the error that ends it, if any.

        `running.finish_reason` is set where nothing can follow what the request arrived with.
        """
        running.hold_to(matcher)
        if running.finish_reason is not None:
            return None
        request = running.request
        if request.grammar is not None:
            self.compiler.hold(running, request.grammar, num_bytes=request.grammar_bytes, client=request.client)
        return self.compute([running])[0]

    def compute(self, requests: Sequence[RunningRequest]) -> list[Exception | None]:
        """Compute which tokens may come next in these answers, each of which has a grammar and has not ended.

        Returns the error that ends an answer, or None, for each; `finish_reason` is set where an answer can only end.
        """
        self.masks.compute([_matcher(running) for running in requests])
        return [self._check(running, _matcher(running)) for running in requests]

    def plan_mask(self, rows: Iterable[tuple[int, RunningRequest]], num_rows: int) -> bytes:
        """Return the mask of a plan with `num_rows` sampling rows, of which `rows` (number, request) have a grammar."""
        return self.masks.plan_mask([(row, _matcher(running)) for row, running in rows], num_rows)

    def remove(self, running: RunningRequest) -> None:
        """Forget a request that has ended, with or without a grammar. If that is not compiled yet, it need not be."""
        if running.grammar is not None:
            self.masks.remove(running.grammar)
        if running.request.grammar is not None:
            self.compiler.cancel(running)

    def stats(self) -> GrammarStats:
        """Return what grammars have cost since start."""
        compiler, masks = self.compiler, self.masks
        return GrammarStats(
            num_requests=self._num_requests,
            num_failed=self.num_failed,
            num_running=len(masks),
            num_compiled=compiler.num_compiled,
            num_cached=compiler.num_cached,
            compile_s=compiler.seconds,
            cache_bytes=compiler.num_bytes,
            num_masks=masks.num_computed,
            mask_s=masks.seconds,
        )

    def close(self) -> None:
        """End the compiler's thread; idempotent."""
        self.compiler.close()

    def _check(self, running: RunningRequest, matcher: GrammarMatcher) -> Exception | None:
        if matcher.has_failed:
            return matcher.failure()
        forbidden = self._forbidden(running)
        if self.masks.forbid(matcher, forbidden):
            return None
        if not matcher.may_end:
            return matcher.contradiction(forbidden) if forbidden else matcher.failure()
        running.end_by_grammar()
        return None

    def _forbidden(self, running: RunningRequest) -> frozenset[int]:
        """The tokens that the request does not want next, though its grammar may allow them."""
        params = running.request.params
        is_short = running.num_output_tokens < params.min_tokens
        eos = self._eos_token_ids if params.ignore_eos or is_short else frozenset()
        return eos.union(params.stop_token_ids) if is_short else eos


def _matcher(running: RunningRequest) -> GrammarMatcher:
    assert running.grammar is not None
    return running.grammar
