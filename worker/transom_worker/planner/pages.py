"""How large the arena's pages are, and how far apart blocks start in them.

A page must serve every group, and what does not fill it is lost. Blocks of different groups seldom fit evenly, so strides may be
padded a little: a stride that divides the page wastes nothing but its padding. The page that is chosen loses least, where losing
counts the worst group's waste in a full page, what is left behind the last page, and half a page per group that is not filled:
so pages are small where they fit well, and as large as they must be where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_worker.errors import ConfigError
from transom_worker.kvcache.layout import BLOCK_ALIGNMENT_BYTES, ArenaLayout, GroupLayout, blocks_inside

MAX_PAGES = (
    2**15
)  # with one block a page, taking a block costs 2.5 times as much as with twenty; finer pages gain nothing then
MAX_LARGEST_BLOCKS = 64  # of the group with the largest blocks, in a page; padding of at most 1/32 besides
MAX_PADDING = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChoice:
    """A page size, every group's stride in it, and the share of a full page that the worst group cannot use."""

    page_bytes: int
    stride_bytes: tuple[int, ...]
    waste: float


def make_layout(groups: Sequence[GroupLayout], pool_bytes: int) -> ArenaLayout:
    """The arena of at most `pool_bytes` for these blocks, with the pages that lose least.

    Raises:
        ConfigError: not even one page per group fits.
    """
    choice = choose_pages([group.block_bytes for group in groups], pool_bytes)
    return ArenaLayout(
        page_bytes=choice.page_bytes,
        num_pages=pool_bytes // choice.page_bytes,
        groups=tuple(
            replace(group, stride_bytes=stride) for group, stride in zip(groups, choice.stride_bytes, strict=True)
        ),
    )


def group_waste(layout: ArenaLayout, group: int) -> float:
    """The share of the group's pages that its blocks cannot fill."""
    return 1.0 - layout.blocks_per_page(group) * layout.groups[group].block_bytes / layout.page_bytes


def choose_pages(block_bytes: Sequence[int], pool_bytes: int) -> PageChoice:
    """The page size and strides for blocks of these sizes.

    Raises:
        ConfigError: not even one page per group fits.
    """
    sizes = [-(-size // BLOCK_ALIGNMENT_BYTES) for size in block_bytes]  # in alignments, as all sizes below
    pool = pool_bytes // BLOCK_ALIGNMENT_BYTES
    largest, num_groups = max(sizes), len(sizes)
    if largest * num_groups > pool:
        raise ConfigError(
            f"The KV pool of {pool_bytes} bytes cannot hold one block of each of {num_groups} cache group(s), which take "
            f"{', '.join(str(size * BLOCK_ALIGNMENT_BYTES) for size in sizes)} bytes; give a pool "
            f"(--kv-cache-memory-bytes) of at least {2 * num_groups * largest * BLOCK_ALIGNMENT_BYTES}."
        )
    page = _best_page(sizes, pool)
    fits = [_fit(page, size) for size in sizes]
    return PageChoice(
        page_bytes=page * BLOCK_ALIGNMENT_BYTES,
        stride_bytes=tuple(stride * BLOCK_ALIGNMENT_BYTES for _, stride in fits),
        waste=max(_waste(page, size) for size in sizes),
    )


def _best_page(sizes: Sequence[int], pool: int) -> int:
    """The page that loses least, the smallest of equals; whole strides of the largest block, padded or not, are tried."""
    largest, num_groups = max(sizes), len(sizes)
    descending = sorted(set(sizes), reverse=True)  # the largest blocks waste most: they rule pages out first
    best_loss, best_page = math.inf, largest
    least = max(1, -(-pool // (MAX_PAGES * largest)))
    for count in range(least, least + MAX_LARGEST_BLOCKS):
        for stride in range(largest, largest + largest // MAX_PADDING + 1):
            page = count * stride
            unfilled = num_groups * page / (2 * pool)
            if page * num_groups > pool or unfilled + 1 - largest / stride >= best_loss:
                break  # wider strides lose more
            loss = unfilled + pool % page / pool
            waste = 0.0
            for size in descending:
                waste = max(waste, _waste(page, size))
                if loss + waste >= best_loss:
                    break
            else:
                best_loss, best_page = loss + waste, page
    return best_page


def _waste(page: int, size: int) -> float:
    return 1.0 - _fit(page, size)[0] * size / page


def _fit(page: int, size: int) -> tuple[int, int]:
    """Blocks per page and their stride: one that divides the page, or the unpadded one where it gives more."""
    unpadded = blocks_inside(page, size)
    count = page // size
    while count > unpadded and page % count:
        count -= 1
    return (count, page // count) if count > unpadded else (unpadded, size)
