"""Kernels address blocks that lie more than 2**31 elements after the first block of a cache.

A pool is as large as a device's memory, and 32 bits reach 4 GiB of 16-bit elements. The far caches here are address space alone:
only pages that hold a block are ever touched.
"""

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.paged_case import Sequence, Shape, make_case
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.kv_write import QkvInputs
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.reference import LatentInputs
from transom_kernels.launch import INTERPRETED
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="On a GPU such a cache would have to be copied there.")

IDS = 3
STRIDE = 2**30 + 128  # elements of a block: the third begins after 2**31
NO_RESERVE = 0x4000  # of memory or swap, for what will never be touched


def far(near: torch.Tensor) -> torch.Tensor:
    """The same blocks, each `STRIDE` elements after the one before."""
    num_bytes = ((len(near) - 1) * STRIDE + near[0].numel()) * near.element_size()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    cache = torch.frombuffer(memory, dtype=near.dtype).as_strided(near.shape, (STRIDE, *near.stride()[1:]))
    cache.copy_(near)
    return cache


def test_keys_and_values_are_written() -> None:
    near = [torch.zeros(IDS, 4, 2, 8, dtype=torch.float16) for _ in range(2)]
    there = [far(cache) for cache in near]
    k, v = torch.randn(3, 2, 8).half(), torch.randn(3, 2, 8).half()
    for k_cache, v_cache in (near, there):
        slots = torch.tensor([11, 0, 5])
        prepare_qkv_triton(QkvInputs(q=k[:, :0], k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots))
    assert all(cache.equal(wanted) for cache, wanted in zip(there, near, strict=True))
    assert near[0][2, 3].equal(k[0])


def test_paged_attention() -> None:
    case = make_case([Sequence(start=10, count=1)], Shape(size=16, dtype=torch.float16))
    there = case.inputs(k_cache=far(case.k_cache.nan_to_num()), v_cache=far(case.v_cache.nan_to_num()))
    assert paged_attention_triton(there).equal(paged_attention_triton(case.inputs()))


def test_latent_attention_and_indexer() -> None:
    near = torch.randn(IDS, 4, 1, 16).half()
    there, slots = far(near), torch.tensor([[11, 0, 5, -1, 8]])
    q, sinks = torch.randn(1, 3, 16).half(), torch.randn(3)
    one, visible, weights = torch.zeros(1, dtype=torch.int64), torch.tensor([3]), torch.rand(1, 3)
    inputs = LatentInputs(
        q=q, window_cache=near, window_slots=slots, entry_cache=near, entry_slots=slots.flip(1), sink_logits=sinks, scale=0.3
    )  # fmt: skip
    wanted = latent_attention_triton(inputs)
    for window_cache, entry_cache in ((there, there), (there, near), (near, there)):
        got = latent_attention_triton(replace(inputs, window_cache=window_cache, entry_cache=entry_cache))
        assert got.equal(wanted)
    rest: Any = (slots, one, visible)
    got, wanted = (select_entries_triton(q, weights, cache, *rest, top_k=2, scale=1.0) for cache in (there, near))
    assert got.equal(wanted)


def test_pooled_rows() -> None:
    near = [torch.randn(IDS, 4, 1, 10) for _ in range(2)]
    slots, bias = torch.tensor([[11, 0, 5, 8], [3, 9, 10, -1]]), torch.randn(4, 10)
    got = pool_rows_triton(far(near[0]), far(near[1]), slots, bias)
    assert got.equal(pool_rows_triton(near[0], near[1], slots, bias))


def test_block_copies() -> None:
    near, there = torch.randint(0, 2**31, (2, IDS, 16), dtype=torch.int32)
    source, target = far(near).view(torch.uint8), far(there).view(torch.uint8)  # copied by words of 32 bits
    copy_blocks_triton(source, target, [(0, 2), (2, 1)])
    assert target.view(torch.int32).equal(torch.stack([there[0], near[2], near[0]]))
