"""Log-probabilities and ranks of chosen and likely tokens."""

from transom_kernels.logprobs.op import RowLogprobs, logprobs

__all__ = ["RowLogprobs", "logprobs"]
