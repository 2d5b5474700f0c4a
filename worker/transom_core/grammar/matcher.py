"""`GrammarMatcher`: one answer's position in its grammar."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from transom_core.errors import RequestError, StepFailed, WorkerLost

if TYPE_CHECKING:
    from transom_core.grammar.vocabulary import GrammarVocabulary

_REFUSED = "doesn't satisfy the grammar"  # the library's error for a refused token has this; other errors are limits
_FULL = (
    "too many states"  # its error if the answers of one compiled grammar have reached all lexer states that it may have
)


class GrammarMatcher:
    """Follows one answer through its grammar, token by token. Not thread-safe.

    The tokens that a matcher allows depend only on the grammar and on the tokens that it has consumed. So an answer that continues
    after a preemption, or at another worker, is constrained exactly like one that was never interrupted.
    """

    def __init__(self, library_matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self.library_matcher = library_matcher
        self.vocabulary = vocabulary
        self.num_consumed = 0
        self._num_copies = [0]  # of the compiled grammar; all copies share this list
        # with a new grammar, once: answers that fill that one together as well would do so for ever
        self._may_go_on = True

    def copy(self) -> GrammarMatcher:
        """Return a matcher at the same position, which takes about 10 kB of its own. All copies share the compiled grammar and the
        lexer states that their answers have reached; one limit holds for these states together (`GrammarCompiler.forget`)."""
        copied = GrammarMatcher(self.library_matcher.deep_copy(), self.vocabulary)
        copied.num_consumed, copied._num_copies = self.num_consumed, self._num_copies
        self._num_copies[0] += 1
        return copied

    def shares_grammar(self, other: GrammarMatcher) -> bool:
        """Return whether both are copies of one compiled grammar."""
        return self._num_copies is other._num_copies

    @property
    def is_complete(self) -> bool:
        """Return whether no token can follow, because the answer is complete."""
        return self.library_matcher.is_stopped() and not self.has_failed

    @property
    def may_end(self) -> bool:
        """Return whether the answer may end here. The grammar may allow a continuation too."""
        return self.library_matcher.is_accepting()

    @property
    def has_failed(self) -> bool:
        """Return whether a limit was exceeded, or a token was consumed that the grammar does not allow. A failure is final."""
        return self.library_matcher.is_error()

    def consume(self, token_id: int) -> None:
        """Advance by one token, which the last mask allowed.

        Raises:
            RequestError: the grammar has become too complex at this token.
            StepFailed: the grammar does not allow the token.
            WorkerLost: other answers have filled the compiled grammar; this one can go on with a new one, as after a loss.
        """
        self.num_consumed += 1
        if not self.library_matcher.consume_token(token_id):
            raise self.failure(refused_token_id=token_id)

    def replay(self, token_ids: Iterable[int]) -> None:
        """Advance by tokens that another worker sampled under the same grammar. End-of-text tokens after the answer are ignored.

        Raises:
            RequestError: the grammar does not allow them, or has become too complex.
        """
        self._may_go_on = False
        for token_id in token_ids:
            if token_id in self.vocabulary.eos_token_ids and self.is_complete:
                return
            self.num_consumed += 1
            if not self.library_matcher.consume_token(token_id):
                failure = self.failure(refused_token_id=token_id)
                if not isinstance(failure, StepFailed):
                    raise failure
                raise RequestError(
                    f"Token {self.num_consumed - 1} of resumed_output_ids is not what the grammar of the answer allows; resume "
                    "only with tokens of an answer to the same request.",
                    param="resumed_output_ids",
                )
        self.warm_up()

    def warm_up(self) -> None:
        """Compute the mask for the next token once, so that computing it again takes microseconds."""
        if not self.library_matcher.is_stopped():
            self.library_matcher.compute_bitmask()

    def failure(self, *, refused_token_id: int | None = None) -> Exception:
        """Return the error that ends an answer whose matcher has failed."""
        if refused_token_id is not None and _REFUSED in self.library_matcher.get_error():
            return StepFailed(f"Token {refused_token_id} was sampled, which the grammar of the answer does not allow.")
        if self._may_go_on and self._num_copies[0] > 1 and _FULL in self.library_matcher.get_error():
            return WorkerLost(
                "The answers of this grammar have filled it; this one goes on elsewhere.", loss_cause="stopped"
            )
        if self.library_matcher.stop_reason() in ("NoExtension", "NoExtensionBias"):
            return RequestError(
                f"No token can continue the answer after {self.num_consumed} tokens: what its grammar demands next cannot be "
                "written with this model's tokens, or can never end.",
                param="grammar",
            )
        return RequestError(
            f"The grammar of the answer has become too complex after {self.num_consumed} tokens to hold the answer to it; send a "
            "smaller schema, with shorter repetitions in patterns.",
            param="grammar",
        )

    def contradiction(self, forbidden: Collection[int]) -> RequestError:
        """Return the error of a request that forbids every token which its grammar allows next."""
        return RequestError(
            f"After {self.num_consumed} tokens the grammar of the answer allows only tokens that end it by stop_token_ids, end of "
            f"text included, before min_tokens: {sorted(forbidden)[:8]}; lower min_tokens, or leave these tokens out of "
            "stop_token_ids.",
            param="min_tokens",
        )
