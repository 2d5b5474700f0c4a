"""Layers with a recurrent state: gated delta nets (Qwen3-Next, Qwen 3.5) and Mamba-2 (Granite 4, Nemotron-H, Falcon-H1)."""

from transom_kernels.linear_recurrence.inputs import RecurrenceInputs, StateBatch
from transom_kernels.linear_recurrence.op import gated_rms_norm, linear_recurrence

__all__ = ["RecurrenceInputs", "StateBatch", "gated_rms_norm", "linear_recurrence"]
