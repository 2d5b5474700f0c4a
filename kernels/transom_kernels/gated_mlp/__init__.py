"""The activation of a gated feed-forward layer."""

from transom_kernels.gated_mlp.op import gated_silu

__all__ = ["gated_silu"]
