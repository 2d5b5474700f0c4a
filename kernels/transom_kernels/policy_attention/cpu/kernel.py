"""The CPU kernels `attend` and `combine` of `policy_attention`: those of `paged_attention`, over compact block tables.

Units and key tiles begin at multiples of their size, counted in aligned indices (`table.py`).
"""

from __future__ import annotations

from typing import Any

from transom_kernels.paged_attention.cpu.decode import make_decode
from transom_kernels.paged_attention.cpu.kernel import attend_over, combine_over
from transom_kernels.paged_attention.cpu.layout import AttentionKind, decode_layout
from transom_kernels.policy_attention.cpu.prompt import make_attend_tile
from transom_kernels.policy_attention.cpu.table import make_table


def make_attend(**parameters: Any) -> Any:
    """Build `attend`; the parameters are the fields of `AttentionKind`."""
    kind = AttentionKind(**parameters)
    return attend_over(make_attend_tile(kind), make_decode(kind, make_table(decode_layout(kind).shift)))


def make_combine(**parameters: Any) -> Any:
    """Build `combine`; the parameters are the fields of `AttentionKind`."""
    kind = AttentionKind(**parameters)
    return combine_over(kind, make_table(decode_layout(kind).shift))
