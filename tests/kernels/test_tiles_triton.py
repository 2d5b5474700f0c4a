"""Every tile that can be chosen at run time is also compiled ahead of time, where its memory is checked."""

from __future__ import annotations

import pytest

from tests.kernels.compiled_cases import ELEMENT_BYTES, all_cases
from transom_kernels.latent_attention.kernel import attend_rows, score_entries
from transom_kernels.latent_attention.tuning import attend_config, score_config
from transom_kernels.moe.gpu import choose_tile
from transom_kernels.moe.kernel import into_experts, out_of_experts
from transom_kernels.paged_attention.triton.attend import attend
from transom_kernels.paged_attention.triton.tuning import kernel_config, tilings

WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))  # of keys and values
Tile = tuple[object, ...]


def compiled(kernel: object, typed: str, *constants: str) -> set[Tile]:
    """Constants, bytes of an element, warps and stages of a kernel's compilations; `typed` is the argument that says the bytes."""
    return {
        (
            *(case.constants[name] for name in constants),
            ELEMENT_BYTES[case.types[typed].removeprefix("*")],
            case.num_warps,
            case.num_stages,
        )
        for case in all_cases()
        if case.kernel is kernel
    }


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32])
def test_attention(group: int, element_bytes: int) -> None:
    known = compiled(attend, "q", "D", "E", "BLOCK_M", "BLOCK_N")
    for key_size, value_size in WIDTHS:
        for cut in tilings(group=group, key_size=key_size, element_bytes=element_bytes, cache_bytes=element_bytes):
            config = kernel_config(
                rows=cut.tile_tokens * group, key_size=key_size, value_size=value_size, element_bytes=element_bytes,
                cache_bytes=element_bytes,
            )  # fmt: skip
            chosen = (config.block_m, config.block_n, element_bytes, config.num_warps, config.num_stages)
            assert (key_size, value_size, *chosen) in known


@pytest.mark.parametrize("kernel", [into_experts, out_of_experts])
def test_experts(kernel: object) -> None:
    known = compiled(kernel, "x", "IS_MX", "BLOCK_M", "BLOCK_N", "BLOCK_J")
    for is_mx in (False, True):
        for element_bytes in (2, 4):
            for pairs in (1, 16, 17, 600, 3072, 3073, 65_536):
                tile = choose_tile(pairs, 32, is_mx=is_mx, element_bytes=element_bytes)
                sizes = (tile.block_m, tile.block_n, tile.block_j)
                assert (is_mx, *sizes, element_bytes, tile.num_warps, tile.num_stages) in known


def test_latent_attention() -> None:
    """In V4's own widths, however many ranks share its heads."""
    attends = compiled(attend_rows, "q", "D", "BLOCK_H", "BLOCK_N")
    scores = compiled(score_entries, "q", "D", "BLOCK_H", "BLOCK_N")
    for element_bytes in (2, 4):
        for heads in (8, 16, 32, 64, 128):
            config = attend_config(heads, 512, element_bytes)
            assert (512, config.block_h, config.block_n, element_bytes, config.num_warps, config.num_stages) in attends
        config = score_config(64, 128, element_bytes)
        assert (128, config.block_h, config.block_n, element_bytes, config.num_warps, config.num_stages) in scores
