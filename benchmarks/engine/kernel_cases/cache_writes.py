"""`prepare_qkv` (norms, RoPE, quantisation and cache write in one pass), and block copies between the device and pinned host
memory, as the host tier makes them.

Legend: T tokens, H query heads, KVH KV heads, D head width, P block size.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.engine.kernel_cases.case import Case, Check, Prepared, Promise, Scale, Tensors
from benchmarks.engine.kernel_cases.paged import BLOCK, Heads, random_caches
from benchmarks.engine.kernel_cases.rows import rotary_tables
from transom_kernels.block_copy import block_copy_between
from transom_kernels.kv_write import Preparation, QkvInputs
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.quantised_kv import FORMATS, KvFormat
from transom_kernels.quantised_kv.format import dequantise_rows
from transom_worker.execution.tiers.load_copies import LoadBoard, RowCopies, make_loads

ERROR_LIMIT = 6e-3
LOAD_LIMIT_S = 10.0
# Of rows that were quantised. Half a step is up to 1/16 of a number of fp8, of which the interpreter drops small ones, and 1/254 or
# 1/14 of a row's largest number in the other formats.
QUANTISED_LIMITS = {"fp8": 0.07, "int8": 0.015, "int4": 0.2}
CHECKED = 256  # tokens
LLAMA, TINY = Heads(query=32, kv=8, size=128), Heads(query=4, kv=2, size=16)
KV_WRITE = Promise(name="kv_write", of="bandwidth", least=0.80)


def cases(scale: Scale) -> Iterator[Case]:
    """Of a long prompt, of a decoding batch, and of blocks that move."""
    many, few = scale.pick(32_768, 6), scale.pick(64, 3)
    heads = TINY if scale.is_tiny else LLAMA
    for tokens, with_norm in ((many, False), (many, True), (few, False)):
        yield Case(
            name=f"kv_write{' with norms' if with_norm else ''} tokens {tokens}",
            prepare=partial(_write, heads, tokens, with_norm, None),
            formula="queries, keys and values in and out, the rotary tables and slots",
            promises=(KV_WRITE,) if tokens == many else (),
        )
    for kv_format in FORMATS.values():
        yield Case(
            name=f"kv_write {kv_format.name} tokens {many}",
            prepare=partial(_write, heads, many, True, kv_format),
            formula="queries, keys and values in, queries and quantised rows out, the rotary tables and slots",
        )
    for block_bytes in scale.some((32 << 10, 512 << 10), (32 << 10, 512 << 10), (256,)):
        for is_load in (False, True):
            yield Case(
                name=f"host tier {'loads' if is_load else 'spills'} blocks of {block_bytes}",
                prepare=partial(_host_copies, scale.pick(512, 3), block_bytes, is_load),
                formula="the blocks once over the bus",
                rivals=("one copy",),
            )


def _write(heads: Heads, tokens: int, with_norm: bool, kv_format: KvFormat | None, device: torch.device) -> Prepared:
    fused = torch.randn(tokens, heads.query + 2 * heads.kv, heads.size, device=device, dtype=torch.bfloat16)
    q, k, v = fused.split_with_sizes((heads.query, heads.kv, heads.kv), dim=1)
    tables = rotary_tables(tokens, heads.size, device)
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    k_cache, v_cache, scales = random_caches(heads, -(-2 * tokens // BLOCK), device, kv_format)
    k_scale, v_scale = scales or (None, None)
    weights = [torch.randn(count, heads.size, device=device).bfloat16() for count in (heads.query, heads.kv)]
    inputs = QkvInputs(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale, slots=slots, tables=tables,
        preparation=Preparation(
            norm=with_norm,
            q_weight=weights[0] if with_norm else None,
            k_weight=weights[1] if with_norm else None,
            hadamard=kv_format is not None and kv_format.name == "int4",
        ),
    )  # fmt: skip

    def run() -> Tensors:
        out, few = prepare_qkv_triton(inputs), slots[:CHECKED]
        return out, _rows(k_cache, k_scale, few), _rows(v_cache, v_scale, few)

    def check(out: Tensors) -> list[Check]:
        """Of the first tokens, which the reference writes into an unquantised cache, in order."""
        few, in_order = slice(0, CHECKED), torch.arange(min(tokens, CHECKED), device=device)
        shape = (-(-len(in_order) // BLOCK), BLOCK, heads.kv, heads.size)
        k_rows, v_rows = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        plain = replace(
            inputs, q=q[few].float(), k=k[few], v=v[few], k_cache=k_rows, v_cache=v_rows, k_scale=None, v_scale=None,
            slots=in_order, tables=(tables[0][few], tables[1][few]),
        )  # fmt: skip
        queries = prepare_qkv_reference(plain)
        of_cache = ERROR_LIMIT if kv_format is None else QUANTISED_LIMITS[kv_format.name]
        return [
            Check(got=out[0][few], wanted=queries, limit=ERROR_LIMIT),
            Check(got=out[1], wanted=_rows(k_rows, None, in_order), limit=of_cache),
            Check(got=out[2], wanted=_rows(v_rows, None, in_order), limit=of_cache),
        ]

    written_bytes = tokens * 2 * heads.row_bytes(kv_format)
    return Prepared(
        run=run,
        timed=lambda: prepare_qkv_triton(inputs),
        check=check,
        num_bytes=fused.nbytes + q.nbytes + written_bytes + tables[0].nbytes + tables[1].nbytes + slots.nbytes,
    )


def _rows(cache: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values at slots of a cache, in float32."""
    elements = cache[slots // BLOCK, slots % BLOCK]
    return elements.float() if scale is None else dequantise_rows(elements, scale[slots // BLOCK, slots % BLOCK])


def _host_copies(num_blocks: int, block_bytes: int, is_load: bool, device: torch.device) -> Prepared:
    """Spills go on the stream of the step, loads on one of their own; beside them one plain copy of as much."""
    slab = torch.randint(0, 256, (2 * num_blocks, block_bytes), dtype=torch.uint8, device=device)
    host = torch.randint(0, 256, (2 * num_blocks, block_bytes), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    source, target = (host, slab) if is_load else (slab, host)
    sources, targets = torch.randperm(2 * num_blocks).split(num_blocks)
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))

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
        return [Check(got=out[0][targets.to(target.device)], wanted=source[sources.to(source.device)], limit=0.0)]

    return Prepared(
        run=run,
        timed=copy,
        check=check,
        num_bytes=num_blocks * block_bytes,
        rivals={"one copy": lambda: lambda: target[:num_blocks].copy_(source[:num_blocks], non_blocking=True)},
        captured=False,
    )
