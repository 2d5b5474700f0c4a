"""The CPU kernels of `paged_attention`: `attend` (tiles of prompts, and decoding rows) and `combine`. `cpu.py` launches them.

Items of `attend`: tiles of prompts times KV heads, then slots times decoding sequences times KV heads. Items of `combine`: decoding
sequences times KV heads.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import load_i32
from transom_kernels.cpu.work import argument, claim, finish, scratch
from transom_kernels.paged_attention.cpu_arguments import DECODING, KV_HEADS, NUM_SLOTS, NUM_TILE_ITEMS, TILES
from transom_kernels.paged_attention.cpu_decode import make_decode
from transom_kernels.paged_attention.cpu_prompt import make_prompt


def make_attend(
    dtype: str,
    stored: str,
    group: int,
    width: int,
    value_width: int,
    has_soft_cap: bool,
    sink_dtype: str | None,
) -> Any:
    """Arguments: see `cpu_arguments`."""
    decode, _ = make_decode(group, width, value_width, dtype, has_soft_cap, sink_dtype, stored)
    attend_tile = make_prompt(group, width, value_width, dtype, has_soft_cap, sink_dtype, stored)

    def attend(arguments, thread):
        item = claim(thread)
        while item >= 0:
            kv_heads, num_tile_items = argument(arguments, KV_HEADS), argument(arguments, NUM_TILE_ITEMS)
            kv_head = item % kv_heads
            if item < num_tile_items:
                tile = argument(arguments, TILES) + 8 * (item // kv_heads)
                attend_tile(arguments, scratch(thread), load_i32(tile), load_i32(tile + 4), kv_head)
            else:
                index = (item - num_tile_items) // kv_heads
                num_slots, decoding = argument(arguments, NUM_SLOTS), argument(arguments, DECODING)
                sequence = index // num_slots
                if decoding:
                    sequence = load_i32(decoding + 4 * sequence)
                decode(arguments, scratch(thread), sequence, kv_head, index % num_slots)
            finish(thread)
            item = claim(thread)

    return attend


def make_combine(
    dtype: str,
    stored: str,
    group: int,
    width: int,
    value_width: int,
    has_soft_cap: bool,
    sink_dtype: str | None,
) -> Any:
    """Arguments: see `cpu_arguments`."""
    _, combine = make_decode(group, width, value_width, dtype, has_soft_cap, sink_dtype, stored)

    def combine_all(arguments, thread):
        item = claim(thread)
        while item >= 0:
            kv_heads, decoding = argument(arguments, KV_HEADS), argument(arguments, DECODING)
            sequence = item // kv_heads
            if decoding:
                sequence = load_i32(decoding + 4 * sequence)
            combine(arguments, sequence, item % kv_heads)
            finish(thread)
            item = claim(thread)

    return combine_all
