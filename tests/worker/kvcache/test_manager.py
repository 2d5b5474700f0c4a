"""`KvCache` on its own, and its imports from the disk; `test_cache_random` has random sequences."""

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.prefix_chains import chain_of
from tests.present import present
from tests.worker.kvcache.cache_driver import ROOT, CacheDriver
from tests.worker.kvcache.cache_model import BLOCK, check_cache, layout
from transom_core.errors import ConfigError
from transom_core.kv_cache import load_rates
from transom_core.kv_cache.prefix_search import PrefixHit
from transom_core.kv_cache.tiers import HOST
from transom_worker.kvcache.eviction.eviction_policy import Watched
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node


def cache_of(*mix: str, num_pages: int = 100, caching: bool = True) -> KvCache:
    return KvCache(layout(mix, num_pages=num_pages), block_size=BLOCK, enable_prefix_caching=caching)


def run(cache: KvCache, token_ids: list[int]) -> None:
    """Prefill a sequence in chunks of 8 tokens from its hit, and release it."""
    chain = chain_of(token_ids, BLOCK)
    hit = cache.find(chain, len(token_ids))
    blocks = cache.begin(chain, ROOT, hit=hit)
    cache.plan_checkpoints(blocks, [])
    for end in [*range(hit.start + 8, len(token_ids), 8), len(token_ids)]:
        assert cache.extend(blocks, end)
        cache.advance(blocks, token_ids, end)
        check_cache(cache, [blocks])
    cache.release(blocks)


def test_blocks_of_a_sequence_are_consecutive_while_pages_are_free() -> None:
    cache = cache_of("full", "window", num_pages=400, caching=False)
    started = [cache.begin([], ROOT) for _ in range(4)]
    for end in range(1, 90):  # all grow together
        for blocks in started:
            assert cache.extend(blocks, end)
            cache.advance(blocks, [], end)
    full = [blocks.tables[0].run for blocks in started]
    breaks = sum(b != a + 1 for ids in full for a, b in itertools.pairwise(ids))
    # strides do not divide pages here: an id is skipped at some page borders, nowhere else
    borders = sum(
        cache.arena.page_of(0, a) != cache.arena.page_of(0, b) for ids in full for a, b in itertools.pairwise(ids)
    )
    assert breaks <= borders
    assert all(ids == sorted(ids) for ids in full)


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 8 tokens"):
        KvCache(layout(["full"], num_pages=9, block_size=8), block_size=4)


# What the cache learns of clients that return to a checkpoint

TURN = 24  # tokens


def owner(cache: KvCache, token_ids: list[int], num_tokens: int) -> Node:
    """The node whose segment has the last whole hash block of these tokens."""
    return cache.checkpoints.tree.owner[chain_of(token_ids[:num_tokens], BLOCK)[-1]]


def turn(cache: KvCache, history: list[int], number: int, *, rendered_anew: int) -> list[int]:
    """Run a turn's prompt: the last one's without the tokens that its template renders anew, then new ones."""
    begin = len(history) - rendered_anew if history else 0
    token_ids = history[:begin] + [1_000 * number + at for at in range(rendered_anew + TURN)]
    run(cache, token_ids)
    return token_ids


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
@pytest.mark.parametrize("rendered_anew", [0, BLOCK, 2 * BLOCK + 1])
def test_a_turn_is_a_return_though_the_end_of_the_last_prompt_was_rendered_anew(
    mix: tuple[str, ...], rendered_anew: int
) -> None:
    cache = cache_of(*mix)
    history: list[int] = []
    for number in range(1, 4):
        history = turn(cache, history, number, rendered_anew=rendered_anew)
        assert owner(cache, history, len(history)).num_returns == number - 1


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
def test_what_was_rendered_anew_is_evicted_first(mix: tuple[str, ...]) -> None:
    cache = cache_of(*mix)
    first = turn(cache, [], 1, rendered_anew=0)
    history = turn(cache, first, 2, rendered_anew=2 * BLOCK)
    other = [5_000 + at for at in range(TURN)]
    run(cache, other)
    stub, shared = owner(cache, first, len(first)), owner(cache, first, len(first) - 2 * BLOCK)
    assert shared is stub.parent
    assert isinstance(shared.policy_state, Watched)
    assert shared.policy_state.own.watched_from > 0
    assert cache.eviction.evict_one()
    assert stub.parent is None
    for kept in (history, other):
        assert owner(cache, kept, len(kept)).parent is not None


@pytest.fixture(autouse=True)
def small_prompts_are_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 1)


def disk_driver(*, host_pages: int) -> CacheDriver:
    return CacheDriver(("full",), num_pages=40, host_pages=host_pages, has_disk=True)


def find_files(driver: CacheDriver, chain: Sequence[bytes]) -> PrefixHit:
    """Have the cache know that these blocks have files; return the hit on the whole chain."""
    driver.cache.tiers.disk.add(0, chain)
    return driver.cache.find(chain, len(chain) * BLOCK + 1, with_disk=True)


def tokens(seed: int, length: int) -> list[int]:
    return [seed, *(random.Random(seed).randrange(9) for _ in range(length - 1))]


def run_to_its_end(driver: CacheDriver, token_ids: list[int]) -> None:
    """A request over these tokens, to its end."""
    assert driver.begin(token_ids)
    driver.complete(len(driver.sequences) - 1, CheckpointKind.GENERATION, chunk=16)


def test_the_device_gives_up_what_lies_above_an_import() -> None:
    """A locked node in the host tier holds the nodes above it on the device; memory that they pin was promised to others."""
    driver = disk_driver(host_pages=40)
    first = tokens(1, 40)
    run_to_its_end(driver, first)
    run_to_its_end(driver, first + tokens(2, 40))
    cache = driver.cache
    lower = max(cache.checkpoints.tree.nodes(), key=lambda node: node.boundary)
    while lower.tier != HOST:
        assert cache.eviction.evict_one()
    assert present(lower.parent).tier != HOST
    chain = [*chain_of(first + tokens(2, 40), BLOCK)[: lower.boundary], bytes(32)]
    cache.tiers.disk.add(0, [bytes(32)])
    opened = present(cache.tiers.imports.begin(chain, cache.find(chain, len(chain) * BLOCK + 1, with_disk=True)))
    assert opened.locked is lower
    while cache.eviction.evict_one():
        pass
    assert not any(cache.pools[0].pins)
    cache.tiers.imports.end(opened)
    driver.finish()


def test_an_import_keeps_what_it_goes_on_from_in_the_host_tier() -> None:
    """Blocks that were imported before are pinned by no node; room for the rest of the prefix is not made of them."""
    driver = disk_driver(host_pages=4)
    cache = driver.cache
    chain = [bytes([number]) * 32 for number in range(200)]
    most = sum(len(cache.tiers.host.arena.blocks(page, 0)) for page in range(cache.tiers.host.arena.num_pages))
    begin, end = most // 2, most
    first = present(cache.tiers.imports.begin(chain, find_files(driver, chain[:begin])))
    cache.tiers.imports.publish(first)
    cache.tiers.imports.end(first)
    cache.tiers.disk.add(0, chain[begin : end + 1])
    longer = cache.find(chain, (end + 1) * BLOCK + 1, with_disk=True)
    assert cache.tiers.imports.begin(chain, longer) is None  # one block too many: it would have to evict what it needs
    assert all(digest in cache.tiers.host.blocks[0] for digest in chain[:begin])
    second = present(cache.tiers.imports.begin(chain, cache.find(chain, end * BLOCK + 1, with_disk=True)))
    assert len(second.blocks) == end - begin
    assert all(digest in cache.tiers.host.blocks[0] for digest in chain[:begin])
    cache.tiers.imports.end(second)
    driver.finish()
