"""Blocks between workers: every pair of 1, 2, 3 and 5 ranks, every pair of formats, and what cannot be converted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.worker.execution.toy_decoder import architecture
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, LayerTensors
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.sharding import head_share
from transom_worker.kvcache.tiers.block_format.convert import convert_blocks
from transom_worker.kvcache.tiers.block_format.numbers import decode, dequantise, encode, quantise, rotate
from transom_worker.planner import cache_groups

RANKS = (1, 2, 3, 5)
PLAIN = ("float32", "float16", "bfloat16")
QUANTISED = ("fp8", "int8", "int4")
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 3, 8
LAYERS = [
    LayerAttention(num_heads=15, num_kv_heads=3, head_size=WIDTH),
    LayerAttention(num_heads=15, num_kv_heads=5, head_size=WIDTH, window=6),
    LayerAttention(num_heads=15, num_kv_heads=3, head_size=WIDTH, value_size=6),
    LayerAttention(num_heads=15, num_kv_heads=1, head_size=WIDTH, window=6),
    LayerAttention(num_heads=15, num_kv_heads=1, head_size=WIDTH, latent=True),
]
FULL, LATENT, WINDOW = range(3)  # groups
V_WIDTH = (8, 8, 6, 8, 0)  # by layer; 0: K serves as V too


def shares(size: int, formats: tuple[str, str] = ("float32", "float32")) -> KvShares:
    """Full layers in the first format, window layers in the second, latent rows in float32."""
    shape = architecture(LAYERS)
    return KvShares(
        groups=tuple(
            cache_groups(
                shape,
                block_size=BLOCK_SIZE,
                dtype="float32",
                kv_cache_dtype=f"full={formats[0]},window={formats[1]}",
                tensor_parallel_size=size,
                rank=rank,
            )
            for rank in range(size)
        ),
        heads=tuple(
            tuple((kv.start, kv.stop) for kv in (head_share(shape, i, rank, size).kv for i in range(len(LAYERS))))
            for rank in range(size)
        ),
    )


Whole = dict[tuple[int, str], np.ndarray]  # by layer and K or V: float32 [blocks, heads, rows, width]


def whole_numbers(group: int, seed: int = 0) -> Whole:
    rng = np.random.default_rng(seed)
    found = {}
    for layer in shares(1).groups[0][group].spec.layers:
        for name, width in (("k", WIDTH), ("v", V_WIDTH[layer])):
            if width:
                found[layer, name] = rng.normal(
                    size=(NUM_BLOCKS, LAYERS[layer].num_kv_heads, BLOCK_SIZE, width)
                ).astype(np.float32)
    return found


def parts(layout: GroupLayout) -> Iterator[tuple[LayerTensors, str, int, int, int | None]]:
    """Keys and values of each layer: its tensors, "k" or "v", offset, elements of a row, offset of the scales."""
    for tensors in layout.layers:
        yield tensors, "k", tensors.k_offset, tensors.k_size, tensors.k_scale_offset
        if V_WIDTH[tensors.layer]:
            yield tensors, "v", tensors.v_offset, tensors.v_size, tensors.v_scale_offset


def write(whole: Whole, worker: KvShares, group: int) -> list[bytes]:
    """Blocks of each rank, written one number at a time by the layout's definition."""
    out = []
    for rank, groups in enumerate(worker.groups):
        layout = groups[group]
        blocks = np.full((NUM_BLOCKS, layout.block_bytes), 0xAB, dtype=np.uint8)
        for tensors, name, offset, _, scale_at in parts(layout):
            first, end = worker.heads[rank][tensors.layer]
            numbers = whole[tensors.layer, name][:, first:end]
            if scale_at is None:
                put(blocks, offset, encode(numbers, tensors.dtype))
                continue
            turned = rotate(numbers) if tensors.hadamard and name == "k" else numbers
            data, scales = quantise(turned, tensors.format)
            put(blocks, offset, data)
            put(blocks, scale_at, np.ascontiguousarray(scales).view(np.uint8))
        out.append(blocks.tobytes())
    return out


def put(blocks: np.ndarray, offset: int, data: np.ndarray) -> None:
    flat = np.ascontiguousarray(data).reshape(NUM_BLOCKS, -1)
    blocks[:, offset : offset + flat.shape[1]] = flat


def read(data: Sequence[Any], worker: KvShares, group: int) -> list[Whole]:
    """The numbers of each rank's heads."""
    found = []
    for rank, part in enumerate(data):
        layout = worker.groups[rank][group]
        blocks = np.frombuffer(part, dtype=np.uint8).reshape(NUM_BLOCKS, layout.block_bytes)
        one: Whole = {}
        for tensors, name, offset, size, scale_at in parts(layout):
            shape = (NUM_BLOCKS, tensors.num_kv_heads, BLOCK_SIZE)
            size *= DTYPE_BYTES[tensors.dtype]
            rows = blocks[:, offset : offset + int(np.prod(shape[1:])) * size].reshape(*shape, size)
            if scale_at is None:
                one[tensors.layer, name] = decode(rows, tensors.dtype)
                continue
            raw = blocks[:, scale_at : scale_at + int(np.prod(shape[1:])) * 4]
            numbers = dequantise(rows, np.ascontiguousarray(raw).view(np.float32).reshape(shape), tensors.format)
            one[tensors.layer, name] = rotate(numbers) if tensors.hadamard and name == "k" else numbers
        found.append(one)
    return found


@pytest.mark.parametrize(("source", "target"), list(product(RANKS, RANKS)))
def test_every_pair_of_sizes(source: int, target: int) -> None:
    """Also three windows, replicated heads and a latent group; equal to blocks that the target's ranks wrote themselves."""
    before, after = shares(source, ("bfloat16", "float32")), shares(target, ("bfloat16", "float32"))
    for group in (FULL, LATENT, WINDOW):
        whole = whole_numbers(group, seed=group)
        got = convert_blocks(before, after, group, write(whole, before, group))
        assert [part.tobytes() for part in got] == write(whole, after, group)
        assert [part.tobytes() for part in convert_blocks(after, before, group, got)] == write(whole, before, group)


FORMATS = (*PLAIN, *QUANTISED)
ERROR = {
    "float32": 0.0,
    "float16": 2e-3,
    "bfloat16": 1e-2,
    "fp8": 0.12,
    "int8": 0.02,
    "int4": 1.0,
}  # of numbers up to 5


@pytest.mark.parametrize(("source", "target"), list(product(FORMATS, FORMATS)))
def test_every_pair_of_formats(source: str, target: str) -> None:
    for sizes in ((2, 3), (5, 1)):
        before, after = shares(sizes[0], (source, "float32")), shares(sizes[1], (target, "float32"))
        whole = whole_numbers(FULL)
        got = convert_blocks(before, after, 0, write(whole, before, 0))
        if source == target:
            for rank, one in enumerate(read(write(whole, after, 0), after, 0)):
                for key, numbers in read(got, after, 0)[rank].items():
                    np.testing.assert_array_equal(numbers, one[key])  # no second rounding
        for rank, found in enumerate(read(got, after, 0)):
            for (layer, name), values in found.items():
                first, end = after.heads[rank][layer]
                wanted = whole[layer, name][:, first:end]
                assert np.abs(values - wanted).max() <= ERROR[source] + ERROR[target]


def test_numbers_of_the_source_are_converted_through_float32() -> None:
    before, after = shares(1, ("int8", "float32")), shares(1, ("float16", "float32"))
    written = write(whole_numbers(FULL), before, 0)
    (got,) = read(convert_blocks(before, after, 0, written), after, 0)
    (exact,) = read(written, before, 0)
    for key, numbers in got.items():
        np.testing.assert_array_equal(numbers, exact[key].astype(np.float16).astype(np.float32))


def test_no_blocks() -> None:
    got = convert_blocks(shares(2), shares(3), 0, [b"", b""])
    assert [part.size for part in got] == [0, 0, 0]


def test_what_cannot_be_converted() -> None:
    one, two = shares(1), shares(2)
    data = write(whole_numbers(FULL), one, 0)
    full, latent, window = one.groups[0]
    foreign = replace(one, groups=((full, latent, replace(window, spec=replace(window.spec, window=7))),))
    mixed_layers = tuple(replace(tensors, dtype="uint8") for tensors in latent.layers)
    mixed = replace(one, groups=((full, replace(latent, layers=mixed_layers), window),))
    for source, target, group, given, message in [
        (one, two, 0, [*data, b""], "data of 2 ranks was given for a worker of 1"),
        (one, two, 0, [data[0][:-1]], "no whole blocks"),
        (one, two, 5, data, "group 5 was given"),
        (two, one, 0, [b"", bytes(two.groups[1][0].block_bytes)], "gave 0, 1 blocks"),
        (one, foreign, WINDOW, [b""], "is not"),
        (one, mixed, LATENT, [b""], "cannot be converted"),
        (replace(two, heads=(two.heads[0], two.heads[0])), one, 0, [b"", b""], "keeps 1 KV heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert_blocks(source, target, group, given)
    assert convert_blocks(mixed, mixed, LATENT, [b""])[0].size == 0
