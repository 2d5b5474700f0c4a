"""Layers with a recurrent state: gated delta nets (Qwen3-Next, Qwen 3.5), Mamba (Granite 4, Nemotron-H, Falcon-H1, Jamba)."""

from transom_kernels.linear_recurrence.inputs import Convolution, RecurrenceInputs, StateBatch
from transom_kernels.linear_recurrence.op import causal_convolution, gated_rms_norm, linear_recurrence

__all__ = ["Convolution", "RecurrenceInputs", "StateBatch", "causal_convolution", "gated_rms_norm", "linear_recurrence"]
