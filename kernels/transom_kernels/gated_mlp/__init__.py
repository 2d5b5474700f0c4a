"""The activation of gated feed-forward layers (SwiGLU and GEGLU), activation(gate) * up; and relu(up) ** 2, which has no gate."""

from transom_kernels.gated_mlp.op import Activation, Limits, activated_product, gated_activation

__all__ = ["Activation", "Limits", "activated_product", "gated_activation"]
