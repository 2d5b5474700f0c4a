"""Kernels address blocks that lie more than 2**31 elements behind the first block of a cache.

A pool is as large as a device's memory, and 32 bits reach 4 GiB of 16-bit elements. The far caches here are address space alone:
only pages that hold a block are ever touched.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.inputs import QkvInputs
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.inputs import LatentInputs
from transom_kernels.launch import INTERPRETED
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="On a GPU such a cache would have to be copied there.")

IDS = 3
STRIDE = 2**30 + 128  # elements of a block: the third begins behind 2**31
NO_RESERVE = 0x4000  # of memory or swap, for what will never be touched


def far(near: torch.Tensor) -> torch.Tensor:
    """The same blocks, each `STRIDE` elements behind the one before."""
    assert len(near) == IDS
    num_bytes = ((IDS - 1) * STRIDE + near[0].numel()) * near.element_size()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    cache = torch.frombuffer(memory, dtype=near.dtype).as_strided(near.shape, (STRIDE, *near.stride()[1:]))
    cache.copy_(near)
    return cache


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


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
    near = [torch.randn(IDS, 4, 2, 16).half() for _ in range(2)]
    batch = PagedBatch(
        block_size=4,
        num_sink_blocks=0,
        block_table=torch.tensor([[2, 0, 1]], dtype=torch.int32),
        first_block=torch.zeros(1, dtype=torch.int32),
        attend_from=torch.zeros(1, dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int64),
        query_offset=torch.tensor([0, 1], dtype=torch.int32),
        start=torch.tensor([10], dtype=torch.int32),
        block_table_host=[[2, 0, 1]],
        first_block_host=[0],
        attend_from_host=[0],
        start_host=[10],
        count_host=[1],
    )
    q = torch.randn(1, 4, 16).half()
    got, wanted = (
        paged_attention_triton(
            PagedInputs(q=q, k_cache=caches[0], v_cache=caches[1], batch=batch, scale=0.3, rule=MaskRule())
        )
        for caches in ([far(cache) for cache in near], near)
    )
    assert got.equal(wanted)


def test_latent_attention_and_indexer() -> None:
    near = torch.randn(IDS, 4, 1, 16).half()
    there, slots = far(near), torch.tensor([[11, 0, 5, -1, 8]])
    q, sinks = torch.randn(1, 3, 16).half(), torch.randn(3)
    one, visible, weights = torch.zeros(1, dtype=torch.int64), torch.tensor([3]), torch.rand(1, 3)
    for pair in ((there, there), (there, near), (near, there)):
        got, wanted = (
            latent_attention_triton(
                LatentInputs(
                    q=q,
                    window_cache=caches[0],
                    window_slots=slots,
                    entry_cache=caches[1],
                    entry_slots=slots.flip(1),
                    sink_logits=sinks,
                    scale=0.3,
                )
            )
            for caches in (pair, (near, near))
        )
        assert got.equal(wanted)
    chosen = [
        select_entries_triton(q, weights, cache, slots, one, visible, top_k=2, scale=1.0) for cache in (there, near)
    ]
    assert chosen[0].equal(chosen[1])


def test_pooled_rows() -> None:
    near = [torch.randn(IDS, 4, 1, 10) for _ in range(2)]
    slots, bias = torch.tensor([[11, 0, 5, 8], [3, 9, 10, -1]]), torch.randn(4, 10)
    got, wanted = (
        pool_rows_triton(caches[0], caches[1], slots, bias)
        for caches in ([far(near[0]), far(near[1])], [near[0], near[1]])
    )
    assert got.equal(wanted)


def test_block_copies() -> None:
    near, there = torch.randint(0, 2**31, (2, IDS, 16), dtype=torch.int32)
    source, target = far(near).view(torch.uint8), far(there).view(torch.uint8)  # copied by words of 32 bits
    copy_blocks_triton(source, target, [(0, 2), (2, 1)])
    assert target.view(torch.int32).equal(torch.stack([there[0], near[2], near[0]]))
