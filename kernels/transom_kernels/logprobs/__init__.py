"""Log-probabilities and ranks of each row's chosen token and of its most likely tokens."""

from transom_kernels.logprobs.op import RowLogprobs, logprobs

__all__ = ["RowLogprobs", "logprobs"]
