"""Blocks between workers: every pair of 1, 2, 3 and 5 ranks in every format, what cannot be converted, and which bytes a rank
takes from which one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.matrices import matrix
from tests.worker.execution.toy_architecture import architecture
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, LayerTensors
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.sharding import head_share
from transom_worker.kvcache.tiers.block_format import block_digest, block_segments, convert_blocks
from transom_worker.planner.blocks import cache_groups

RANKS = (1, 2, 3, 5)
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 3, 8
LAYERS = [
    LayerAttention(num_heads=15, num_kv_heads=3, head_size=WIDTH),
    LayerAttention(num_heads=15, num_kv_heads=5, head_size=WIDTH, window=6),
    LayerAttention(num_heads=15, num_kv_heads=3, head_size=WIDTH, value_size=6),
    LayerAttention(num_heads=15, num_kv_heads=1, head_size=WIDTH, window=6),
    LayerAttention(num_heads=15, num_kv_heads=1, head_size=WIDTH, latent=True),
    # States and values by head; five ranks share the queries and keys of three key heads.
    LayerAttention(num_heads=15, num_kv_heads=3, head_size=WIDTH, value_size=6, recurrent=3),
]
FULL, LATENT, WINDOW, STATE = GROUPS = range(4)


def shares(size: int, formats: tuple[str, str] = ("float32", "float32")) -> KvShares:
    """Full layers in the first format, window layers in the second, latent rows in float32."""
    shape = architecture(LAYERS)
    held = [[head_share(shape, i, rank, size) for i in range(len(LAYERS))] for rank in range(size)]
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
        heads=tuple(tuple((share.kv.start, share.kv.stop) for share in one) for one in held),
        states=tuple(tuple((share.queries.start, share.queries.stop) for share in one) for one in held),
    )


# By number of the tensors and part: bytes [blocks, heads, rows, bytes of a row].
Whole = dict[tuple[int, str], np.ndarray]


def parts(layout: GroupLayout) -> Iterator[tuple[LayerTensors, tuple[int, str], int, int]]:
    """Keys, values and their scales of each layer: its tensors, their number and a name, the offset, and the bytes of a row."""
    for number, tensors in enumerate(layout.layers):
        size = DTYPE_BYTES[tensors.dtype]
        yield tensors, (number, "k"), tensors.k_offset, tensors.k_size * size
        if tensors.v_offset != tensors.k_offset:  # else K serves as V too
            yield tensors, (number, "v"), tensors.v_offset, tensors.v_size * size
        for name, offset in (("k scales", tensors.k_scale_offset), ("v scales", tensors.v_scale_offset)):
            if offset is not None:
                yield tensors, (number, name), offset, 4


def whole_numbers(worker: KvShares, group: int) -> Whole:
    """Made-up bytes of all heads, in the formats of a worker."""
    rng = np.random.default_rng(group)
    layout = worker.groups[0][group]

    def drawn(tensors: LayerTensors, size: int) -> np.ndarray:
        layer = LAYERS[tensors.layer]
        heads = layer.num_heads if tensors.by_state else layer.num_kv_heads
        return rng.integers(0, 256, (NUM_BLOCKS, heads, layout.rows_per_block, size), dtype=np.uint8)

    return {part: drawn(tensors, size) for tensors, part, _, size in parts(layout)}


def write(whole: Whole, worker: KvShares, group: int) -> list[bytes]:
    """Blocks of each rank, by the layout's definition."""
    out = []
    for rank, groups in enumerate(worker.groups):
        blocks = np.zeros((NUM_BLOCKS, groups[group].block_bytes), dtype=np.uint8)
        for tensors, part, offset, _ in parts(groups[group]):
            first, end = (worker.states if tensors.by_state else worker.heads)[rank][tensors.layer]
            flat = np.ascontiguousarray(whole[part][:, first:end]).reshape(NUM_BLOCKS, -1)
            blocks[:, offset : offset + flat.shape[1]] = flat
        out.append(blocks.tobytes())
    return out


FORMATS = ["float32", "float16", "bfloat16", "fp8", "int8", "int4"]


@pytest.mark.parametrize(("source", "target", "kv_format"), matrix(RANKS, RANKS, FORMATS))
def test_every_pair_of_sizes(source: int, target: int, kv_format: str) -> None:
    """Also three windows, replicated heads, latent rows and states; equal to blocks that the target's ranks wrote themselves."""
    before, after = shares(source, (kv_format, "float32")), shares(target, (kv_format, "float32"))
    for group in GROUPS:
        whole = whole_numbers(before, group)
        wanted = write(whole, after, group)
        got = convert_blocks(before, after, group, write(whole, before, group))
        assert [part.tobytes() for part in got] == wanted
        assert [part.tobytes() for part in convert_blocks(after, before, group, got)] == write(whole, before, group)
        for rank, part in enumerate(got):
            first = part[: after.groups[rank][group].block_bytes].copy()
            digest = block_digest(before, after, group, rank, first)
            first[0] ^= 1
            assert digest != block_digest(before, after, group, rank, first)


def test_what_cannot_be_converted() -> None:
    one, two = shares(1), shares(2)
    data = write(whole_numbers(one, FULL), one, 0)
    full, latent, window, state = one.groups[0]
    foreign = replace(one, groups=((full, latent, replace(window, spec=replace(window.spec, window=7)), state),))
    mixed_layers = tuple(replace(tensors, dtype="uint8") for tensors in latent.layers)
    mixed = replace(one, groups=((full, replace(latent, layers=mixed_layers), window, state),))
    for source, target, group, given, message in [
        (one, two, 0, [*data, b""], "data of 2 ranks was given for a worker of 1"),
        (one, two, 0, [data[0][:-1]], "no whole blocks"),
        (one, two, 5, data, "group 5 was given"),
        (two, one, 0, [b"", bytes(two.groups[1][0].block_bytes)], "gave 0, 1 blocks"),
        (one, foreign, WINDOW, [b""], "is not"),
        (one, mixed, LATENT, [b""], "cannot be converted"),
        (one, shares(1, ("int8", "float32")), FULL, data, "in float32 .* in int8"),
        (replace(two, heads=(two.heads[0], two.heads[0])), one, 0, [b"", b""], "keeps 1 heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert_blocks(source, target, group, given)
    assert convert_blocks(mixed, mixed, LATENT, [b""])[0].size == 0  # no blocks
    assert [part.size for part in convert_blocks(two, shares(3), FULL, [b"", b""])] == [0, 0, 0]


def test_neighbours_are_one_segment_and_copies_are_taken_from_several_ranks() -> None:
    one = shares(1)
    assert [len(block_segments(one, one, group, 0)) for group in GROUPS] == [1, 1, 1, 1]
    assert [one.rank for one in block_segments(shares(3), shares(2), LATENT, 1)] == [1]


@pytest.mark.parametrize("source", RANKS)
def test_no_byte_is_taken_twice(source: int) -> None:
    for group in GROUPS:
        spans = sorted((at, at + size) for _, _, at, size in block_segments(shares(source), shares(2), group, 1))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_head_that_no_rank_keeps_is_said() -> None:
    two = shares(2)
    with pytest.raises(ValueError, match="no rank keeps KV head"):
        block_segments(replace(two, groups=two.groups[:1], heads=two.heads[:1]), shares(1), FULL, 0)
