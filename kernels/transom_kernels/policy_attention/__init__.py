"""Attention over block tables from which a KV policy may have dropped blocks. See `op.py` for the contract."""

from transom_kernels.policy_attention.inputs import PolicyBatch, PolicyInputs
from transom_kernels.policy_attention.op import add_block_mass, empty_statistics, policy_attention

__all__ = ["PolicyBatch", "PolicyInputs", "add_block_mass", "empty_statistics", "policy_attention"]
