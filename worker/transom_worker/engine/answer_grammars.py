"""`AnswerGrammars`: makes the answers of one engine follow the grammars of their requests (structured outputs).

    begin       a request has arrived; its grammar is compiled on another thread, and the request is *held*: it is not admitted yet
    hold        the grammar is ready: from now on a *matcher* follows the request's answer token by token
    compute     the answers have a new token: compute for all of them which tokens may come next (a bit mask over the vocabulary)
    plan_mask   a plan samples tokens of some of these answers: return their masks, in the order of the plan's rows

When an answer with a grammar ends:

- It ends by itself when nothing can follow: after a finished JSON document no end of text is needed.
- End of text is allowed only if the grammar accepts the answer so far; with `ignore_eos` it is never allowed.
- Before `min_tokens`, end of text and `stop_token_ids` are removed from the mask. If no token is left then, an answer that the
  grammar accepts ends, since it cannot be longer. Any other answer gets an error, since its request contradicts itself.
- Stop strings and `stop_token_ids` end an answer where they occur, even in the middle of a document.
"""

from collections.abc import Callable, Iterable, Sequence

from transom_core.contract import Request
from transom_core.grammar import CompiledGrammar, GrammarCompiler, GrammarMasks, GrammarMatcher, GrammarVocabulary
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.running_request import RunningRequest
from transom_worker.telemetry.engine_events import GrammarStats

COMPILE_WAIT_S = 0.02  # the most time for which a step without anything to compute waits for a grammar


class AnswerGrammars:
    """The grammars of one engine's requests. Only the engine's thread calls the methods."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int], has_others: Callable[[], bool]
    ) -> None:
        """`vocab_size` is the number of logits of a position; `eos_token_ids` has all ids that mean end of text. `has_others`,
        which another thread calls, says whether several clients have requests."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self.masks = GrammarMasks(vocab_size)
        self.compiler: GrammarCompiler[RunningRequest] = GrammarCompiler(
            lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=tuple(self._eos_token_ids)),
            has_others=has_others,
        )
        self._num_requests = 0
        self.num_failed = 0  # requests that ended with an error of their grammar

    def check_room(self, request: Request) -> None:
        """Raise `Overloaded` if a request has a grammar, and too many grammars wait to be compiled."""
        if request.grammar is not None:
            self.compiler.check_room(request.client, request.grammar)

    def begin(self, running: RunningRequest, grammar: str) -> None:
        """Begin to compile the grammar of a request."""
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
        """Return the grammars that have become ready; with `may_wait`, wait up to `COMPILE_WAIT_S` for one."""
        if may_wait:
            self.compiler.wait(COMPILE_WAIT_S)
        return self.compiler.take_ready()

    def hold(self, running: RunningRequest, matcher: GrammarMatcher) -> Exception | None:
        """Make a request's answer follow its grammar from now on; return the error that ends the request, if any.

        `running.finish_reason` is set if nothing can follow the output that the request arrived with.
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

        Return for each the error that ends it, or None. `finish_reason` is set for an answer that can only end.
        """
        self.masks.compute([_matcher(running) for running in requests])
        return [self._check(running, _matcher(running)) for running in requests]

    def plan_mask(self, rows: Iterable[tuple[int, RunningRequest]], num_rows: int) -> bytes:
        """Return the mask of a plan with `num_rows` sampling rows; `rows` has (number of the row, request) of those with a
        grammar."""
        return self.masks.plan_mask([(row, _matcher(running)) for row, running in rows], num_rows)

    def remove(self, running: RunningRequest) -> None:
        """Forget a request that has ended, with or without a grammar; a grammar that waits to be compiled is not compiled."""
        if running.grammar is not None:
            self.masks.remove(running.grammar)
            if running.grammar.has_failed and running.request.grammar is not None:
                self.compiler.forget(running.request.grammar, running.grammar)
        if running.request.grammar is not None:
            self.compiler.cancel(running)

    def stats(self) -> GrammarStats:
        """Return how many grammars were used since start, and what they have cost."""
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

    def _check(self, running: RunningRequest, matcher: GrammarMatcher) -> Exception | None:
        """Remove the forbidden tokens from an answer's new mask; if no token is left, end the answer or return its error."""
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
        """Return the tokens that the request's parameters forbid next, even if its grammar allows them."""
        params = running.request.params
        is_short = running.num_output_tokens < params.min_tokens
        eos = self._eos_token_ids if params.ignore_eos or is_short else frozenset()
        return eos.union(params.stop_token_ids) if is_short else eos


def _matcher(running: RunningRequest) -> GrammarMatcher:
    assert running.grammar is not None
    return running.grammar
