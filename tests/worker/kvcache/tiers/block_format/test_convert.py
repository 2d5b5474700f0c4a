"""Blocks between workers: every pair of 1, 2, 3 and 5 ranks, every pair of formats, and what cannot be converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, LayerTensors, Role
from transom_worker.kvcache.tiers.block_format.convert import convert_blocks
from transom_worker.kvcache.tiers.block_format.numbers import decode, dequantise, encode, quantise, rotate

RANKS = (1, 2, 3, 5)
PLAIN = ("float32", "float16", "bfloat16")
QUANTISED = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 3, 8
FULL = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0, 2), block_size=BLOCK_SIZE)
WINDOW = GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(1, 3), block_size=BLOCK_SIZE, window=6)
LATENT = GroupSpec(name="latent", kind=GroupKind.LATENT, layers=(4,), block_size=BLOCK_SIZE)
NUM_HEADS = {0: 3, 2: 3, 1: 5, 3: 1, 4: 1}  # by layer
V_WIDTH = {0: 8, 2: 6, 1: 8, 3: 8, 4: 0}  # 0: K serves as V too


def heads_of(num_heads: int, rank: int, size: int) -> tuple[int, int]:
    """As `model_config.sharding.head_share` divides KV heads, written differently: replicated where there are more ranks."""
    if size <= num_heads:
        parts = np.array_split(np.arange(num_heads), size)
        return int(parts[rank][0]), int(parts[rank][-1]) + 1
    extra = [size // num_heads + (head >= num_heads - size % num_heads) for head in range(num_heads)]
    head = int(np.repeat(np.arange(num_heads), extra)[rank])
    return head, head + 1


def group_layout(spec: GroupSpec, number_format: str, heads: dict[int, int]) -> GroupLayout:
    offset, layers = 0, []
    dtype = QUANTISED.get(number_format, number_format)
    divisor = 2 if number_format == "int4" else 1
    for layer in spec.layers:
        rows = heads[layer] * BLOCK_SIZE
        k_size, v_size = WIDTH // divisor, V_WIDTH[layer] // divisor
        k_bytes, v_bytes = rows * k_size * DTYPE_BYTES[dtype], rows * v_size * DTYPE_BYTES[dtype]
        tensors = LayerTensors(
            layer=layer,
            role=Role.KV,
            num_kv_heads=heads[layer],
            k_size=k_size,
            v_size=v_size or k_size,
            dtype=dtype,
            k_offset=offset,
            v_offset=offset + k_bytes if v_bytes else offset,
        )
        offset += k_bytes + v_bytes
        if number_format in QUANTISED:
            offset = -(-offset // 16) * 16
            tensors = replace(tensors, k_scale_offset=offset, v_scale_offset=offset + 4 * rows if v_bytes else offset)
            offset += (8 if v_bytes else 4) * rows
        layers.append(tensors)
    return GroupLayout(spec=spec, block_bytes=offset, stride_bytes=-(-offset // 256) * 256, layers=tuple(layers))


def shares(size: int, formats: tuple[str, str] = ("float32", "float32")) -> KvShares:
    """Full layers in the first format, window layers in the second, latent rows in float32."""
    held = [{layer: heads_of(count, rank, size) for layer, count in NUM_HEADS.items()} for rank in range(size)]
    counts = [{layer: end - first for layer, (first, end) in one.items()} for one in held]
    return KvShares(
        groups=tuple(
            (
                group_layout(FULL, formats[0], count),
                group_layout(WINDOW, formats[1], count),
                group_layout(LATENT, "float32", count),
            )
            for count in counts
        ),
        heads=tuple(tuple(one[layer] for layer in range(len(NUM_HEADS))) for one in held),
    )


Whole = dict[tuple[int, str], np.ndarray]  # by layer and K or V: float32 [blocks, heads, rows, width]


def whole_numbers(group: GroupSpec, seed: int = 0) -> Whole:
    rng = np.random.default_rng(seed)
    found = {}
    for layer in group.layers:
        for name, width in (("k", WIDTH), ("v", V_WIDTH[layer])):
            if width:
                found[layer, name] = rng.normal(size=(NUM_BLOCKS, NUM_HEADS[layer], BLOCK_SIZE, width)).astype(
                    np.float32
                )
    return found


def write(whole: Whole, worker: KvShares, group: int) -> list[bytes]:
    """Blocks of each rank, written one number at a time by the layout's definition."""
    out = []
    for rank, groups in enumerate(worker.groups):
        layout = groups[group]
        blocks = np.full((NUM_BLOCKS, layout.block_bytes), 0xAB, dtype=np.uint8)
        for tensors in layout.layers:
            first, end = worker.heads[rank][tensors.layer]
            for name in "kv":
                if (tensors.layer, name) not in whole:
                    continue
                numbers = whole[tensors.layer, name][:, first:end]
                offset = tensors.k_offset if name == "k" else tensors.v_offset
                if tensors.k_scale_offset is None:
                    put(blocks, offset, encode(numbers, tensors.dtype))
                    continue
                turned = rotate(numbers) if tensors.hadamard and name == "k" else numbers
                data, scales = quantise(turned, tensors.format)
                put(blocks, offset, data)
                at = tensors.k_scale_offset if name == "k" else tensors.v_scale_offset
                assert at is not None
                put(blocks, at, np.ascontiguousarray(scales).view(np.uint8))
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
        for tensors in layout.layers:
            for name in "kv"[: 2 if V_WIDTH[tensors.layer] else 1]:
                offset, size, scale_at = (
                    (tensors.k_offset, tensors.k_size, tensors.k_scale_offset)
                    if name == "k"
                    else (tensors.v_offset, tensors.v_size, tensors.v_scale_offset)
                )
                shape = (NUM_BLOCKS, tensors.num_kv_heads, BLOCK_SIZE)
                size *= DTYPE_BYTES[tensors.dtype]
                rows = blocks[:, offset : offset + int(np.prod(shape[1:])) * size].reshape(*shape, size)
                if scale_at is None:
                    one[tensors.layer, name] = decode(rows, tensors.dtype)
                    continue
                raw = blocks[:, scale_at : scale_at + int(np.prod(shape[1:])) * 4]
                scales = np.ascontiguousarray(raw).view(np.float32).reshape(shape)
                numbers = dequantise(rows, scales, tensors.format)
                one[tensors.layer, name] = rotate(numbers) if tensors.hadamard and name == "k" else numbers
        found.append(one)
    return found


@pytest.mark.parametrize(("source", "target"), list(product(RANKS, RANKS)))
def test_every_pair_of_sizes(source: int, target: int) -> None:
    """Also three windows, replicated heads and a latent group; equal to blocks that the target's ranks wrote themselves."""
    before, after = shares(source, ("bfloat16", "float32")), shares(target, ("bfloat16", "float32"))
    for group, spec in enumerate((FULL, WINDOW, LATENT)):
        whole = whole_numbers(spec, seed=group)
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
    other_window = replace(WINDOW, window=7)
    counts = {layer: count for layer, count in NUM_HEADS.items()}
    foreign = replace(
        one, groups=((*one.groups[0][:1], group_layout(other_window, "float32", counts), one.groups[0][2]),)
    )
    mixed_layers = tuple(replace(tensors, dtype="uint8") for tensors in one.groups[0][2].layers)
    mixed = replace(one, groups=((*one.groups[0][:2], replace(one.groups[0][2], layers=mixed_layers)),))
    for source, target, group, given, message in [
        (one, two, 0, [*data, b""], "data of 2 ranks was given for a worker of 1"),
        (one, two, 0, [data[0][:-1]], "no whole blocks"),
        (one, two, 5, data, "group 5 was given"),
        (two, one, 0, [b"", bytes(two.groups[1][0].block_bytes)], "gave 0, 1 blocks"),
        (one, foreign, 1, [b""], "is not"),
        (one, mixed, 2, [b""], "cannot be converted"),
        (replace(two, heads=(two.heads[0], two.heads[0])), one, 0, [b"", b""], "keeps 1 KV heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert_blocks(source, target, group, given)
    assert convert_blocks(mixed, mixed, 2, [b""])[0].size == 0
