"""Measures how fast this worker has been lately: smoothed rates of prefill, decode and first tokens."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
LEAST_PREFILL_TOKENS = 16  # steps with fewer prompt tokens are no measure of the prefill rate


class StepRates:
    """Exponential moving averages; 0 until something was measured.

    The first prefill does not count: code and caches are cold, and routers would avoid a worker that looks slow. The prefill
    rate is the average of tokens over the average of seconds, so that a step has weight by its duration.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.first_token_s = 0.0
        self._is_warm = False
        self._prefill_tokens = 0.0  # average of a step
        self._prefill_s = 0.0  # average of a step

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps with prompt tokens, their decode tokens included."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def stepped(self, num_tokens: int, num_seqs: int, elapsed_s: float) -> None:
        """Count a step that computed `num_tokens` tokens of `num_seqs` sequences. One token for each sequence is a decode step."""
        if num_tokens == num_seqs:
            self.decode_step_s = _mean(self.decode_step_s, elapsed_s)
        elif num_tokens - num_seqs >= LEAST_PREFILL_TOKENS:
            if self._is_warm:
                self._prefill_tokens = _mean(self._prefill_tokens, num_tokens)
                self._prefill_s = _mean(self._prefill_s, elapsed_s)
            self._is_warm = True

    def first_token(self, elapsed_s: float) -> None:
        """Count a first token that came `elapsed_s` seconds after its request."""
        self.first_token_s = _mean(self.first_token_s, elapsed_s)


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value
