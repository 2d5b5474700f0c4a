"""The arguments that attention operators pass to their implementations, and the check that they fit together.

Legend: T query tokens, H query heads, KVH KV heads, G query heads per KV head, D key width, Dv value width, P block size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import AttentionBatch, PagedBatch
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import check_kv, head_width

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, kw_only=True)
class AttentionInputs:
    """The arguments that `paged_attention` and `policy_attention` share. Query head `h` reads KV head `h // G`."""

    q: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [ids, P, KVH, D], of q's dtype or quantised; any strides
    v_cache: torch.Tensor  # [ids, P, KVH, Dv]
    batch: AttentionBatch  # block tables and positions
    scale: float  # a score is scale * (q . k)
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sink_logits: torch.Tensor | None = None  # [H]: each adds exp(logit) to its head's softmax sum, without a value
    k_scale: torch.Tensor | None = None  # [ids, P, KVH] float32: scales of quantised keys (`quantised_kv.format`)
    v_scale: torch.Tensor | None = None  # [ids, P, KVH] float32: scales of quantised values

    @property
    def kv_heads(self) -> int:
        """KVH"""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def value_width(self) -> int:
        """Dv"""
        return head_width(self.v_cache)

    def check(self) -> None:
        """Raise ValueError unless shapes, dtypes and options fit together."""
        q, k_cache, v_cache = self.q, self.k_cache, self.v_cache
        if q.dtype not in _DTYPES:
            raise ValueError(f"q is {q.dtype}; it must be one of {', '.join(map(str, _DTYPES))}.")
        check_kv(q.dtype, (k_cache, v_cache), (self.k_scale, self.v_scale))
        width = head_width(k_cache)
        if k_cache.shape[:3] != v_cache.shape[:3] or q.shape[2] != width or q.shape[1] % k_cache.shape[2]:
            raise ValueError(
                f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} of keys of {width} "
                "numbers: widths must agree and query heads be a multiple of KV heads."
            )
        if k_cache.shape[1] != self.batch.block_size:
            raise ValueError(f"cache blocks have {k_cache.shape[1]} tokens; the batch says {self.batch.block_size}.")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap is {self.soft_cap}; it must be above 0, or None.")
        if self.sink_logits is not None and self.sink_logits.shape != q.shape[1:2]:
            raise ValueError(
                f"sink_logits has shape {tuple(self.sink_logits.shape)}; give one per query head: ({q.shape[1]},)."
            )


@dataclass(slots=True, kw_only=True)
class PagedInputs(AttentionInputs):
    """The arguments of `paged_attention` as its implementations receive them."""

    batch: PagedBatch
    rule: MaskRule  # which keys a query sees
