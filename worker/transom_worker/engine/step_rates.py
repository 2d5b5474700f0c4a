"""How fast this worker has been lately, smoothed."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
LEAST_PREFILL_TOKENS = 16  # steps with fewer prompt tokens say nothing of the rate


class StepRates:
    """Exponential means; 0 while nothing was measured.

    The first prefill does not count: code and caches are cold, and a router would stay away from a worker that looks slow. The rate
    is one mean over another, so that long steps weigh as much as they last.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.first_token_s = 0.0
        self._is_warm = False
        self._prefill_tokens = 0.0  # of a step
        self._prefill_s = 0.0  # likewise

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of steps with prompt tokens in them, all their tokens counted."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def stepped(self, num_tokens: int, num_seqs: int, elapsed_s: float) -> None:
        """A step computed so many tokens of so many sequences."""
        if num_tokens == num_seqs:
            self.decode_step_s = _mean(self.decode_step_s, elapsed_s)
        elif num_tokens - num_seqs >= LEAST_PREFILL_TOKENS:
            if self._is_warm:
                self._prefill_tokens = _mean(self._prefill_tokens, num_tokens)
                self._prefill_s = _mean(self._prefill_s, elapsed_s)
            self._is_warm = True

    def first_token(self, elapsed_s: float) -> None:
        """A request's first token came so long after its arrival."""
        self.first_token_s = _mean(self.first_token_s, elapsed_s)


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value
