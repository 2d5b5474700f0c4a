"""Chooses how large the arena's pages are, and how far apart blocks start in them (the stride), so that least memory is lost.

A page is leased to one KV cache group at a time and must serve every group; what a group's blocks do not fill is lost. Blocks of
different groups seldom fit evenly, so a stride may be padded: a stride that divides the page wastes nothing but its padding.
Example, pages of 1,000 bytes and blocks of 240: unpadded, 4 blocks fit in some pages and only 3 in the page where they fit worst;
padded to 250, 4 fit in every page.

The page that loses least is chosen. Its loss is the sum of the worst group's waste in a full page, what is left behind the last
page, and half a page per group that is not filled. So pages are small where blocks fit them well, and as large as they must be
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_worker.errors import ConfigError
from transom_worker.kvcache.layout import BLOCK_ALIGNMENT_BYTES, ArenaLayout, GroupLayout, blocks_inside

# With one block a page, taking a block costs 2.5 times as much time as with twenty; finer pages gain nothing then.
MAX_PAGES = 2**15
MAX_LARGEST_BLOCKS = 64  # blocks in a page, of the group with the largest blocks
MAX_PADDING = 32  # a stride is padded by at most 1/32


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChoice:
    """A page size, every group's stride, and the fraction of a full page that the group with most waste cannot use."""

    page_bytes: int
    stride_bytes: tuple[int, ...]
    waste: float


def make_layout(groups: Sequence[GroupLayout], pool_bytes: int) -> ArenaLayout:
    """Return the arena of at most `pool_bytes` for these blocks, with the pages that lose least.

    Raises:
        ConfigError: the pool cannot hold one page per group.
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
    """Return the fraction of a group's pages that its blocks cannot fill."""
    return 1.0 - layout.blocks_per_page(group) * layout.groups[group].block_bytes / layout.page_bytes


def choose_pages(block_bytes: Sequence[int], pool_bytes: int) -> PageChoice:
    """Return the page size and strides for blocks of these sizes.

    Raises:
        ConfigError: the pool cannot hold one page per group.
    """
    sizes = [
        -(-size // BLOCK_ALIGNMENT_BYTES) for size in block_bytes
    ]  # in multiples of the alignment, as all sizes below
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
    """Return the page that loses least, the smallest of equals. Tries whole strides of the largest block, padded and unpadded."""
    largest, num_groups = max(sizes), len(sizes)
    descending = sorted(set(sizes), reverse=True)  # the largest blocks waste most, so they rule a page out soonest
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
    """Return the fraction of a page that blocks of one size cannot fill."""
    return 1.0 - _fit(page, size)[0] * size / page


def _fit(page: int, size: int) -> tuple[int, int]:
    """Return blocks per page and their stride: a padded one that divides the page if it gives more blocks, else the unpadded
    one.
    """
    unpadded = blocks_inside(page, size)
    count = page // size
    while count > unpadded and page % count:
        count -= 1
    return (count, page // count) if count > unpadded else (unpadded, size)
