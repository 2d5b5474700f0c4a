"""What attention operators get: tensors, and the metadata of one KV cache group for one forward pass. Checks that they fit.

A KV cache group is a set of layers whose caches share one block table (for instance all layers with the same window).

The block table of a sequence has two parts, here with `num_sink_blocks` 2 and `first_block` 9:

    column               0   1  |  2   3   4   5
    logical block        0   1  |  9  10  11  12      token position = logical block * P + offset
    what it holds        sinks  |  the run: the blocks that the window still reaches

Logical block `i` of a sequence holds its tokens [i * P, (i + 1) * P). Here blocks 2 to 8 have left the window and were freed.

Legend: B sequences, T query tokens, N table columns, P block size in tokens, H query heads, KVH KV heads, G query heads per KV
head, D key width, Dv value width.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import check_kv, head_width


class HostBatch(Protocol):
    """The host-side fields of a `PagedBatch`, from which `work_items.plan_work` plans the programs of the Triton kernels."""

    @property
    def block_size(self) -> int:
        """Tokens of a block, P."""

    @property
    def num_sink_blocks(self) -> int:
        """Table columns that hold logical blocks 0, 1, ..."""

    @property
    def first_block_host(self) -> list[int]:
        """[B]: the logical block of each sequence's first column after the sink blocks."""

    @property
    def attend_from_host(self) -> list[int]:
        """[B]: the first position whose key may be read; sink tokens are exempt."""

    @property
    def start_host(self) -> list[int]:
        """[B]: the position of each sequence's first query."""

    @property
    def count_host(self) -> list[int]:
        """[B]: query tokens of each sequence."""


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """The fields that batches with ordinary block tables (`PagedBatch`) and compact ones (`policy_attention.PolicyBatch`) share."""

    block_size: int
    block_table: torch.Tensor  # [B, N] int32 block ids
    query_offset: torch.Tensor  # [B + 1] int32: rows of sequence b are [query_offset[b], query_offset[b + 1])
    start: torch.Tensor  # [B] int32: position of the first query
    count_host: list[int]  # [B]: query tokens of each sequence; empty in steps that CPUs record
    scratch: dict[Any, Any] = field(default_factory=dict)  # key -> what one layer computed for later layers of the step


@dataclass(slots=True, kw_only=True)
class PagedBatch(AttentionBatch):
    """Everything that attention over one KV cache group reads, besides queries and caches.

    Column `c` of `block_table` is logical block `c` if `c < num_sink_blocks`, and otherwise `first_block[b] + c - num_sink_blocks`.
    Only columns with a key in `[0, start + count)` are valid; the others are -1.

    The host copies (`*_host`) hold the same numbers as Python ints, for code that plans on the host. `block_table_host` is empty
    when Triton kernels compute, since they read the table on the device.
    """

    num_sink_blocks: int
    first_block: torch.Tensor  # [B] int32
    attend_from: torch.Tensor  # [B] int32: no key below this position is read, except sink tokens
    slots: torch.Tensor  # [T] int64: block * P + offset to write each token's K/V; the dump block where masked
    block_table_host: list[list[int]]
    first_block_host: list[int]
    attend_from_host: list[int]
    start_host: list[int]

    def block_ids(self, b: int, begin: int, end: int) -> list[int]:
        """Return the block ids of the logical blocks [begin, end) of sequence `b`, from the host's copy of the table.

        Raises:
            IndexError: the table lacks one of them. This is a bug of the scheduler, never a user's mistake.
        """
        num_sink_blocks, table = self.num_sink_blocks, self.block_table_host[b]
        edge = min(max(begin, num_sink_blocks), end)  # [begin, edge) lies in the sink blocks, [edge, end) in the run
        shift = num_sink_blocks - self.first_block_host[b]  # from a logical block of the run to its column
        ids = table[begin:edge]
        if end > edge and edge + shift >= num_sink_blocks:
            ids = ids + table[edge + shift : end + shift]
        if len(ids) != end - begin or (ids and min(ids) < 0):
            raise IndexError(
                f"Sequence {b} reads logical blocks [{begin}, {end}), but its table has {num_sink_blocks} sink blocks and a run "
                f"from block {self.first_block_host[b]}: {table}."
            )
        return ids


CAUSAL = MaskRule()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, kw_only=True)
class AttentionInputs:
    """The arguments that `paged_attention` and `policy_attention` share. Query head `h` reads KV head `h // G`.

    Caches have the dtype of `q`, or are quantised (`quantised_kv.format`; int4 halves the last axis) and come with their scales.
    Caches and scales may have any strides.
    """

    q: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [ids, P, KVH, D]
    v_cache: torch.Tensor  # [ids, P, KVH, Dv]
    batch: AttentionBatch  # block tables and positions
    scale: float  # a score is scale * (q . k)
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sink_logits: torch.Tensor | None = None  # [H]: each adds exp(logit) to its head's softmax sum, without a value
    k_scale: torch.Tensor | None = None  # [ids, P, KVH] float32: scales of quantised keys
    v_scale: torch.Tensor | None = None  # [ids, P, KVH] float32: scales of quantised values

    @property
    def kv_heads(self) -> int:
        """KV heads, KVH."""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def value_width(self) -> int:
        """Numbers of a value of one head, Dv."""
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
                "numbers: widths must agree, and the query heads must be a multiple of KV heads."
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
    """The arguments of `paged_attention`."""

    batch: PagedBatch
    rule: MaskRule = CAUSAL  # which keys a query sees
    # The KV heads of the rank that has most, if the heads are divided among ranks unequally: all ranks then split the keys alike.
    most_kv_heads: int = 0
    launches: dict[Any, Any] | None = None  # that were prepared for these caches, by calls of one layer
