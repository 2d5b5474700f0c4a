"""Other implementations (*rivals*) of attention on equal shapes: torch's own, which know no pages.

They get contiguous keys and values; their time does not include a gather, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.kernel_cases.case import Run
from benchmarks.engine.kernel_cases.paged import dense
from transom_kernels.paged_attention.inputs import PagedInputs

DECODE_RIVALS = ("sdpa", "flex")
PROMPT_RIVALS = ("flash", "flex")


def rivals_of(paged: PagedInputs, names: Sequence[str]) -> dict[str, Callable[[], Run]]:
    """Rival -> what makes its inputs, when it is its turn."""
    makers: dict[str, Callable[[PagedInputs], Run]] = {"sdpa": _sdpa, "flash": _flash, "flex": _flex}
    return {name: (lambda make=makers[name]: make(paged)) for name in names}


def _sdpa(paged: PagedInputs) -> Run:
    q, k, v = dense(paged)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flash(paged: PagedInputs) -> Run:
    q, k, v = dense(paged)
    group = q.shape[1] // k.shape[1]
    all_k, all_v = (part.repeat_interleave(group, 1) for part in (k, v))  # not every version's flash groups heads

    def run() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, all_k, all_v, is_causal=True)

    return run


def _flex(paged: PagedInputs) -> Run:
    """Compiled on its first call, which is not timed; the block mask is made once, as a server would."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else, after a handful of shapes, it would fall back to an eager one without a word
    q, k, v = dense(paged)
    compiled = torch.compile(flex_attention, dynamic=False)
    if q.shape[2] == 1:
        return lambda: compiled(q, k, v, enable_gqa=True)
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, q.shape[2], k.shape[2], device=q.device)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)
