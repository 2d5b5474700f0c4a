"""What our kernels are timed beside (*rivals*): torch's own attention, which knows no pages, and our kernels in other tunings.

Torch gets contiguous keys and values; its time does not include a gather, which favours it. If a tuning's time over ours is below
1, that tuning is faster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.kernel_cases.case import Run
from benchmarks.engine.kernel_cases.paged import dense
from transom_kernels.moe import gpu
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.triton import launcher

DECODE_RIVALS = ("sdpa", "flex")
PROMPT_RIVALS = ("flash", "flex")
# Rival -> what it changes in a kernel's configuration
TUNINGS: Mapping[str, Mapping[str, int]] = {
    "tuned stages 3": {"num_stages": 3},
    "tuned stages 5": {"num_stages": 5},
    "tuned warps 8": {"num_warps": 8},
    "tuned keys 32": {"block_n": 32},
}
DECODE_TUNINGS, PROMPT_TUNINGS = ("tuned stages 5", "tuned warps 8"), ("tuned stages 3", "tuned keys 32")
EXPERT_TUNINGS = ("tuned stages 3", "tuned warps 8")


def rivals_of(paged: PagedInputs, names: Sequence[str]) -> dict[str, Callable[[], Run]]:
    """Rival -> what makes its inputs, when it is its turn."""
    makers: dict[str, Callable[[PagedInputs], Run]] = {"sdpa": _sdpa, "flash": _flash, "flex": _flex}
    makers |= {name: partial(_tuned, TUNINGS[name]) for name in TUNINGS}
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


def _tuned(changes: Mapping[str, int], paged: PagedInputs) -> Run:
    """Our kernel, which is compiled on its first call; that is not timed."""
    kernels: dict[Any, Any] = {}
    config = launcher.kernel_config

    def run() -> object:
        with (
            patch.object(launcher, "kernel_config", lambda **shape: replace(config(**shape), **changes)),
            patch.object(launcher, "_layers", kernels),
        ):
            return launcher.paged_attention_triton(paged)

    return run


def tuned_experts(name: str, run_moe: Run) -> Run:
    """`run_moe` with another `Tile`."""
    choose = gpu.choose_tile

    def run() -> object:
        with patch.object(gpu, "choose_tile", lambda *shape, **how: replace(choose(*shape, **how), **TUNINGS[name])):
            return run_moe()

    return run
