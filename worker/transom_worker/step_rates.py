"""How fast this worker has been lately, smoothed."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest measurement
LEAST_PREFILL_TOKENS = 16  # steps with fewer prompt tokens say nothing of the rate


class StepRates:
    """Exponential means; 0 while nothing was measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.first_token_s = 0.0

    def stepped(self, num_tokens: int, num_seqs: int, elapsed_s: float) -> None:
        """A step computed so many tokens of so many sequences."""
        if num_tokens == num_seqs:
            self.decode_step_s = _mean(self.decode_step_s, elapsed_s)
        elif num_tokens - num_seqs >= LEAST_PREFILL_TOKENS and elapsed_s > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, num_tokens / elapsed_s)

    def first_token(self, elapsed_s: float) -> None:
        """A request's first token came so long after its arrival."""
        self.first_token_s = _mean(self.first_token_s, elapsed_s)


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value
