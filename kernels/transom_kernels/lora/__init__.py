"""Low-rank changes of projections (LoRA adapters), which differ from row to row."""

from transom_kernels.lora.op import add_lora_
from transom_kernels.lora.reference import LoraWeights

__all__ = ["LoraWeights", "add_lora_"]
