"""Chooses the page size of the KV memory, and the distance between block starts, so that the least memory is lost; and
computes how many requests of one length fit the pages.

The *pool* is the KV memory of one rank. It is divided into pages of equal size, each leased to one KV cache group at a time. So the
blocks of every group should fill a page well.

    stride   the distance in bytes between the starts of a group's blocks; *padded* if it is larger than the block
    waste    the fraction of a page's bytes that a group's blocks cannot fill
    loss     the fraction of the pool that a page size loses; the page size with the smallest loss is chosen

A group has the same number of blocks in every page. Block `b` starts at byte `b * stride` of the pool, so a block may cross the end
of a page; such a block is not used. Example, pages of 1,000 bytes and blocks of 240 bytes: with a stride of 240 a page has 3 or 4
whole blocks, so every page counts as 3 (waste 28 %); with the stride padded to 250 every page has 4 (waste 4 %).

The loss of a page size is the sum of

    - the waste of the group with most waste,
    - the bytes after the last whole page, as a fraction of the pool,
    - half a page per group, as a fraction of the pool: each group's last page is half full on average.

So the chosen pages are small if all groups' blocks fill small pages well, and larger otherwise.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import BLOCK_ALIGNMENT_BYTES, ArenaLayout, GroupLayout, blocks_inside
from transom_core.kv_cache.retention import Retention

# More pages would hardly save memory, and they cost time: allocating a block takes 2.5 times as long with one block a page as with
# twenty.
MAX_PAGES = 2**15
# The page sizes tried hold `count` of the largest blocks, for this many counts from the smallest that MAX_PAGES allows.
NUM_BLOCK_COUNTS = 64
MAX_PADDING_FRACTION = 32  # a stride is padded by at most 1/32 of the block


def make_layout(groups: Sequence[GroupLayout], pool_bytes: int) -> ArenaLayout:
    """Return the arena of at most `pool_bytes` for these blocks, with the page size that loses least memory.

    Raises:
        ConfigError: the pool cannot hold one page per group.
    """
    # All sizes from here on are in multiples of the alignment.
    sizes = [-(-group.block_bytes // BLOCK_ALIGNMENT_BYTES) for group in groups]
    pool = pool_bytes // BLOCK_ALIGNMENT_BYTES
    largest, num_groups = max(sizes), len(sizes)
    if largest * num_groups > pool:
        raise ConfigError(
            f"The KV pool of {pool_bytes} bytes cannot hold one block of each of {num_groups} cache group(s), which take "
            f"{', '.join(str(size * BLOCK_ALIGNMENT_BYTES) for size in sizes)} bytes; give a pool "
            f"(--kv-cache-memory-bytes) of at least {2 * num_groups * largest * BLOCK_ALIGNMENT_BYTES}."
        )
    page = _best_page(sizes, pool)
    strides = [_best_stride(page, size)[1] * BLOCK_ALIGNMENT_BYTES for size in sizes]
    return ArenaLayout(
        page_bytes=page * BLOCK_ALIGNMENT_BYTES,
        num_pages=pool // page,
        groups=tuple(replace(group, stride_bytes=stride) for group, stride in zip(groups, strides, strict=True)),
    )


def make_host_layout(layout: ArenaLayout, host_bytes: int) -> ArenaLayout:
    """Return the arena of a host tier of at most `host_bytes`, with blocks and pages of the same sizes as the device's `layout`.

    Raises:
        ConfigError: the memory cannot hold one page per group.
    """
    num_pages, least = host_bytes // layout.page_bytes, len(layout.groups)
    if num_pages < least:
        raise ConfigError(
            f"A host tier of {host_bytes} bytes holds {num_pages} pages of {layout.page_bytes} bytes, and {least} KV cache "
            f"group(s) need one each; give --swap-space at least {-(-least * layout.page_bytes // 1024)}KiB, or 0 for none."
        )
    return replace(layout, num_pages=num_pages)


def group_waste(layout: ArenaLayout, group: int) -> float:
    """Return the waste of a group in a layout."""
    return 1.0 - layout.blocks_per_page(group) * layout.groups[group].block_bytes / layout.page_bytes


def _best_page(sizes: Sequence[int], pool: int) -> int:
    """Return the page size with the smallest loss; of equal losses, the smallest size.

    A candidate is a multiple of a stride of the largest block, unpadded or padded.
    """
    largest, num_groups = max(sizes), len(sizes)
    descending = sorted(set(sizes), reverse=True)  # the largest blocks waste most, so they rule out a page size soonest
    best_loss, best_page = math.inf, largest
    min_count = max(1, -(-pool // (MAX_PAGES * largest)))
    for count in range(min_count, min_count + NUM_BLOCK_COUNTS):
        for stride in range(largest, largest + largest // MAX_PADDING_FRACTION + 1):
            page = count * stride
            half_pages = num_groups * page / (2 * pool)
            if page * num_groups > pool or half_pages + 1 - largest / stride >= best_loss:
                break  # wider strides lose more
            loss = half_pages + pool % page / pool
            waste = 0.0
            for size in descending:
                waste = max(waste, _waste(page, size))
                if loss + waste >= best_loss:
                    break
            else:
                best_loss, best_page = loss + waste, page
    return best_page


def _waste(page: int, size: int) -> float:
    """Return the waste of blocks of one size."""
    return 1.0 - _best_stride(page, size)[0] * size / page


def _best_stride(page: int, size: int) -> tuple[int, int]:
    """Return the number of blocks in every page, and the stride that allows it.

    The stride is padded so that it divides the page, if that gives more blocks than the unpadded stride does. Example: a page of
    1,000 and blocks of 240 give (4, 250).
    """
    num_unpadded = blocks_inside(page, size)
    count = page // size
    while count > num_unpadded and page % count:
        count -= 1
    return (count, page // count) if count > num_unpadded else (num_unpadded, size)


def num_computed(length: int) -> int:
    """Return how many tokens of a request of `length` tokens get keys and values: all except the last, which is only sampled."""
    return max(1, length - 1)


def peak_demands(retentions: Sequence[Retention], length: int, *, block_size: int, lag: int) -> list[tuple[int, ...]]:
    """Return the demands of one request of `length` tokens. `retentions` says, by group, which tokens the request keeps.

    A *demand* is the blocks, by group, that one request holds at one of its peaks. The *lag* is the tokens of a request that are in
    flight (their step has not answered yet) when its next token is planned; blocks are freed that many tokens later.

    A request holds the most blocks at the first token of a block, when it has just got one more block. Example with a window of 40
    tokens and blocks of 16: at position 64 a request holds blocks 1 to 4, from position 71 on only blocks 2 to 4. The number of
    blocks that a sliding group holds repeats with a period; that of a full group only grows. So the peaks are among the positions
    of the last period before the length. Groups may peak at different positions there, so a request can have several demands.

    A demand is left out if another one is at least as large in every group. `block_size` is the worker's `--block-size`, the
    smallest block of all groups.
    """
    period = math.lcm(block_size, *(r.period for r in retentions if not r.keeps_everything))
    last = (num_computed(length) - 1) // block_size
    demands: list[tuple[int, ...]] = []
    for boundary in range(last, max(-1, last - period // block_size), -1):
        held = tuple(retention.allocated_blocks(boundary * block_size, lag=lag) for retention in retentions)
        if not any(_is_at_least(other, held) for other in demands):
            demands.append(held)
    return demands


def max_requests(layout: ArenaLayout, demands: Sequence[Sequence[int]], *, once: Sequence[int]) -> int:
    """Return the largest number of requests whose blocks fit the pages at each of the demands, without preemption and with an empty
    prefix cache.

    All requests reach the length at the same time, one token a step, so they are at the same demand at a time. `once[g]` more
    blocks of group `g` are needed, however many requests run. Example with one group, 4 blocks a page and 10 pages: 3 requests
    with a demand of 12 blocks fit, because ceil(36 / 4) = 9 pages.
    """
    per_page = [layout.blocks_per_page(group) for group in range(len(layout.groups))]

    def num_pages(count: int) -> int:
        """Return the pages that `count` requests need."""
        return max(
            sum(-(-(count * held + extra) // fits) for held, extra, fits in zip(demand, once, per_page, strict=True))
            for demand in demands
        )

    return bisect_right(range(1, layout.num_pages * max(per_page) + 1), layout.num_pages, key=num_pages)


def in_flight_blocks(retentions: Sequence[Retention], max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the blocks, by group, that a step of `max_num_batched_tokens` prompt tokens takes beyond the demands while in flight.

    A full group has 0: it keeps these blocks anyway, so the demands already count them. A snapshot stands for any number of tokens.
    """
    return tuple(
        0
        if retention.keeps_everything or retention.spec.is_state
        else -(-max_num_batched_tokens // retention.block_size)
        for retention in retentions
    )


def _is_at_least(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one demand is at least as large as another in every group."""
    return all(a >= b for a, b in zip(one, other, strict=True))
