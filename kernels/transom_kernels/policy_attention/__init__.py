"""Attention over block tables from which a KV policy may have dropped blocks. `op.py` defines the operators."""

from transom_kernels.policy_attention.op import add_block_mass, empty_statistics, policy_attention
from transom_kernels.policy_attention.reference import PolicyBatch, PolicyInputs

__all__ = ["PolicyBatch", "PolicyInputs", "add_block_mass", "empty_statistics", "policy_attention"]
