"""`prepare_qkv` (norms, RoPE, quantisation and cache write in one pass), and block copies: in the device's memory, and between it
and pinned host memory, as the host tier makes them.

Legend: T tokens, H query heads, KVH KV heads, D head width, P block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale, Target, Tensors
from kernel_cases.paged import BLOCK, Heads, cached_rows, quantised
from transom_kernels.block_copy import block_copy_between
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.hadamard import rotate_heads
from transom_kernels.kv_write.inputs import Preparation, QkvInputs
from transom_kernels.quantised_kv import FORMATS, KvFormat
from transom_worker.execution.tiers.load_copies import LoadBoard, RowCopies, make_loads

ERROR_LIMIT = 6e-3
LOAD_LIMIT_S = 10.0
# Of rows that were quantised. Half a step is up to 1/16 of a number of fp8, of which the interpreter drops small ones, and 1/254 or
# 1/14 of a row's largest number otherwise.
QUANTISED_LIMITS = {"fp8": 0.07, "int8": 0.015, "int4": 0.2}
LLAMA, TINY = Heads(query=32, kv=8, size=128), Heads(query=4, kv=2, size=16)
TARGET = Target(least=0.80, of="bandwidth")


def cases(scale: Scale) -> Iterator[Case]:
    """Of a long prompt, of a decoding batch, and of blocks that move."""
    many, few = scale.pick(32_768, 6), scale.pick(64, 3)
    for tokens, with_norm in ((many, False), (many, True), (few, False)):
        yield Case(
            name=f"kv_write{' with norms' if with_norm else ''} tokens {tokens}",
            prepare=partial(_write, TINY if scale.is_tiny else LLAMA, tokens, with_norm),
            formula="queries, keys and values in and out, the rotary tables and slots",
            target=TARGET if tokens == many else None,
        )
    for kv_format in FORMATS.values():
        yield Case(
            name=f"kv_write {kv_format.name} tokens {many}",
            prepare=partial(_write, TINY if scale.is_tiny else LLAMA, many, True, kv_format=kv_format),
            formula="queries, keys and values in, queries and quantised rows out, the rotary tables and slots",
        )
    for pairs in scale.some((16, 1024), (1024,), (2,)):
        yield Case(
            name=f"block copies {pairs}",
            prepare=partial(_copies, pairs, scale.pick(512 << 10, 256)),
            formula="twice the blocks",
        )
    for block_bytes in scale.some((32 << 10, 512 << 10), (32 << 10, 512 << 10), (256,)):
        for is_load in (False, True):
            yield Case(
                name=f"host tier {'loads' if is_load else 'spills'} blocks of {block_bytes}",
                prepare=partial(_host_copies, scale.pick(512, 3), block_bytes, is_load),
                formula="the blocks once over the bus",
            )


def _write(
    heads: Heads, tokens: int, with_norm: bool, device: torch.device, *, kv_format: KvFormat | None = None
) -> Prepared:
    size, num_rows = heads.size, heads.query + 2 * heads.kv
    fused = torch.randn(tokens, num_rows, size, device=device, dtype=torch.bfloat16)
    q, k, v = fused.split_with_sizes((heads.query, heads.kv, heads.kv), dim=1)
    angles = torch.rand(tokens, size // 2, device=device) * 6.28
    cos = torch.cat([angles.cos(), angles.cos()], -1).bfloat16()
    sin = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    part, ids = BLOCK * heads.kv * size, -(-2 * tokens // BLOCK)
    slab = torch.empty(ids * 2 * part, device=device, dtype=torch.bfloat16)
    shape, strides = (ids, BLOCK, heads.kv, size), (2 * part, size, BLOCK * size, 1)
    caches = [slab.as_strided(shape, strides, at) for at in (0, part)]
    weights = [torch.randn(count, size, device=device).bfloat16() for count in (heads.query, heads.kv)]
    how = Preparation(norm=True, q_weight=weights[0], k_weight=weights[1]) if with_norm else Preparation()
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    is_rotated = kv_format is not None and kv_format.name == "int4"
    if kv_format is not None:
        how = replace(how, hadamard=is_rotated)
        (k_cache, k_scale), (v_cache, v_scale) = (quantised(cache.zero_(), kv_format) for cache in caches)
        caches, scales = [k_cache, v_cache], (k_scale, v_scale)

    def write() -> torch.Tensor:
        k_scale, v_scale = scales or (None, None)
        return prepare_qkv_triton(
            QkvInputs(
                q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1], slots=slots, tables=(cos, sin), preparation=how,
                k_scale=k_scale, v_scale=v_scale,
            )
        )  # fmt: skip

    def run() -> Tensors:
        out = write()
        places = (slots // BLOCK, slots % BLOCK)
        written = zip(caches, scales or (None, None), strict=True)
        return out, *(cached_rows(cache, scale, *places) for cache, scale in written)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        if with_norm:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + how.eps) * weight.double()
        turned = wide * cos.double()[:, None] + wide.roll(size // 2, -1) * sin.double()[:, None]
        return rotate_heads(turned) if is_rotated else turned

    def check(out: Tensors) -> list[Check]:
        wanted = (rotated(q, weights[0]), rotated(k, weights[1]), v.double())
        of_cache = ERROR_LIMIT if kv_format is None else QUANTISED_LIMITS[kv_format.name]
        limits = (ERROR_LIMIT, of_cache, of_cache)
        return [
            Check(got=got, wanted=expected, limit=limit)
            for got, expected, limit in zip(out, wanted, limits, strict=True)
        ]

    return Prepared(
        run=run,
        timed=write,
        check=check,
        num_bytes=fused.nbytes
        + q.nbytes
        + tokens * 2 * _row_bytes(heads, kv_format)
        + cos.nbytes
        + sin.nbytes
        + slots.nbytes,
    )


def _row_bytes(heads: Heads, kv_format: KvFormat | None) -> int:
    """Of a token's keys, or values, with their scales."""
    if kv_format is None:
        return 2 * heads.kv * heads.size
    return heads.kv * (heads.size // kv_format.numbers_per_element + 4)


def _copies(num_pairs: int, block_bytes: int, device: torch.device) -> Prepared:
    slab = torch.randint(0, 256, (2 * num_pairs, block_bytes), dtype=torch.uint8, device=device)
    order = torch.randperm(2 * num_pairs).tolist()
    pairs = list(zip(order[:num_pairs], order[num_pairs:], strict=True))

    def run() -> Tensors:
        copy_blocks_triton(slab, slab, pairs)
        return (slab,)

    def check(out: Tensors) -> list[Check]:
        sources, targets = (torch.tensor([pair[side] for pair in pairs], device=device) for side in (0, 1))
        return [Check(got=out[0][targets], wanted=slab[sources], limit=0.0)]

    return Prepared(run=run, check=check, num_bytes=2 * num_pairs * block_bytes, captured=False)


def _host_copies(num_blocks: int, block_bytes: int, is_load: bool, device: torch.device) -> Prepared:
    """Spills go on the stream of the step, loads on one of their own; beside them one plain copy of as much."""
    slab = torch.randint(0, 256, (2 * num_blocks, block_bytes), dtype=torch.uint8, device=device)
    host = torch.randint(0, 256, (2 * num_blocks, block_bytes), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    source, target = (host, slab) if is_load else (slab, host)
    order = torch.randperm(2 * num_blocks).tolist()
    pairs = list(zip(order[:num_blocks], order[num_blocks:], strict=True))
    sources, targets = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))

    def load() -> None:
        board = LoadBoard()
        loads = make_loads(board, device)
        loads.start(1, [RowCopies(source, target, pairs)])
        loads.poll(wait=True)
        board.wait(LOAD_LIMIT_S)
        loads.close()
        if board.take().loaded != [1]:
            raise RuntimeError("the load did not end")

    def copy() -> None:
        load() if is_load else block_copy_between(source, target, pairs)

    def run() -> Tensors:
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize()  # a spill may still run when the host reads its target
        return (target.clone(),)

    def check(out: Tensors) -> list[Check]:
        wanted = source[sources.to(source.device)]
        return [Check(got=out[0][targets.to(target.device)], wanted=wanted, limit=0.0)]

    def plain() -> Callable[[], object]:
        return lambda: target[:num_blocks].copy_(source[:num_blocks], non_blocking=True)

    return Prepared(
        run=run,
        timed=copy,
        check=check,
        num_bytes=num_blocks * block_bytes,
        rivals={"one copy": plain},
        captured=False,
    )
