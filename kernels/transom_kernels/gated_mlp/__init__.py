"""The activation of a gated feed-forward layer: SwiGLU, GEGLU."""

from transom_kernels.gated_mlp.op import Activation, activated_product, gated_activation

__all__ = ["Activation", "activated_product", "gated_activation"]
