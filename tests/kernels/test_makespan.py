"""The programs that `plan_work` makes keep a device busy, by planning alone.

Makespan: the keys that the busiest multiprocessor reads, if each takes the next program when it has finished one. The share is
what all programs read over what all multiprocessors could have read in that time.
"""

import heapq
from dataclasses import dataclass

import pytest

from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.tuning import tilings
from transom_kernels.paged_attention.triton.work_items import Tiling, plan_work

CONTEXTS = [1024, 1025, 1500, 2049, 3000, 4000, 4096, 4097, 6000, 9000, 20_000, 32_768, 50_001, 131_072]
NEW_TOKENS = [1, 2, 4, 5, 16, 17, 30, 33, 64, 65, 100, 129, 200, 257, 300, 384, 400, 512]
BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 33, 48, 64]
SHAPES = {  # KV heads, query heads for each, width, bytes of a cached number
    "Llama 3 8B": (8, 4, 128, 2),
    "a rank of eight of Llama 3 8B": (1, 4, 128, 2),
    "gpt-oss": (8, 8, 64, 2),
    "Gemma 3 4B": (4, 2, 256, 2),
    "Qwen 3 32B, cache of fp8": (8, 8, 128, 1),
}
LEAST_BYTES = 16 << 20  # of keys and values a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What `plan_work` reads of a batch."""

    block_size: int
    num_sink_blocks: int
    first_block_host: list[int]
    attend_from_host: list[int]
    start_host: list[int]
    count_host: list[int]


def tilings_of(name: str, multiprocessors: int = 132) -> tuple[Tiling, ...]:
    kv_heads, group, width, cache_bytes = SHAPES[name]
    sizes = {"key_size": width, "element_bytes": 2, "cache_bytes": cache_bytes}
    return tilings(group=group, kv_heads=kv_heads, multiprocessors=multiprocessors, **sizes)


def keys_of_items(found: tuple[Tiling, ...], context: int, count: int, rule: MaskRule | None = None) -> list[int]:
    """What each program of a sequence alone reads for a KV head, the longest first."""
    tiling = next(one for one in found if one.min_new_tokens <= count <= one.max_new_tokens)
    own = {"start_host": [context], "count_host": [count], "first_block_host": [0], "attend_from_host": [0]}
    items = plan_work(Batch(block_size=16, num_sink_blocks=0, **own), rule or MaskRule(), tiling).items
    return (items[:, 7] - items[:, 6]).tolist()


def busy_share(keys: list[int], repeats: int, multiprocessors: int) -> float:
    """The share of the makespan in which multiprocessors are busy, if each of these programs runs `repeats` times."""
    busy = [0] * multiprocessors
    for one in sorted(keys * repeats, reverse=True):
        heapq.heapreplace(busy, busy[0] + one)
    return sum(busy) / (max(busy) * multiprocessors)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("multiprocessors", "least"), [(132, 0.7), (108, 0.69)])
def test_a_device_is_busy_from_16_mib_of_keys_and_values_on(name: str, multiprocessors: int, least: float) -> None:
    """H100 and H200, and A100: from 1,024 to 131,072 cached tokens, 1 to 512 new ones and 1 to 64 sequences."""
    kv_heads, _, width, cache_bytes = SHAPES[name]
    found = tilings_of(name, multiprocessors)
    for context in CONTEXTS:
        for count in NEW_TOKENS:
            keys = keys_of_items(found, context, count)
            for batch in BATCHES:
                if batch * (context + count) * kv_heads * width * 2 * cache_bytes < LEAST_BYTES:
                    continue
                repeats = batch * kv_heads
                waves = -(-len(keys) * repeats // multiprocessors)
                if sum(keys) * repeats >= 0.7 * max(keys) * waves * multiprocessors:
                    continue  # even if each wave takes as long as the longest program
                share = busy_share(keys, repeats, multiprocessors)
                assert share >= least, f"{share:.2f} at {batch} sequences, {count} tokens after {context}"


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_has_128_programs_from_32k_tokens_on(name: str) -> None:
    for context in CONTEXTS:
        num_items = len(keys_of_items(tilings_of(name), context - 1, 1)) * SHAPES[name][0]
        assert num_items * -(-32_768 // context) >= 128


def test_what_is_short_is_one_program() -> None:
    """So is what a window of gpt-oss shows, whatever the context; and many tiles fill the device without splits."""
    for name, most in (("Llama 3 8B", 256), ("gpt-oss", 512)):
        assert keys_of_items(tilings_of(name), most - 1, 1) == [most]
        assert len(keys_of_items(tilings_of(name), most, 1)) > 1
    assert keys_of_items(tilings_of("gpt-oss"), 99_000, 1, MaskRule(window=128)) == [128]
    assert len(keys_of_items(tilings_of("Llama 3 8B"), 8192, 2048)) == 2048 // 32
