"""The hit search against brute force, and outcomes of prompt tokens that always add up."""

from hashlib import blake2b

from hypothesis import assume, given, settings, strategies as st

from tests.core.kv_cache.window_repair_model import COMPRESSED, RULES, Layout, make_groups
from tests.how_many import num_examples
from tests.worker.kvcache.cache_model import MIXES, cheapest_hit, live_blocks, spec
from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import find_hit, hit_limit
from transom_core.kv_cache.retention import Retention
from transom_worker.kvcache.prefix import prefix_outcome
from transom_worker.kvcache.prefix.digest_table import PLACES
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.prefix_outcome import classify

UNITS = 24
DIGESTS = [blake2b(bytes([i]), digest_size=32).digest() for i in range(UNITS)]


def presence() -> st.SearchStrategy[set[bytes]]:
    """Any set of hash blocks, or one with few gaps."""
    gaps = st.sets(st.sampled_from(DIGESTS), max_size=3).map(lambda gone: set(DIGESTS) - gone)
    return st.one_of(st.sets(st.sampled_from(DIGESTS)), gaps)


@settings(max_examples=num_examples(daily=100, exhaustive=900), deadline=None)
@given(
    st.lists(st.lists(st.one_of(RULES, COMPRESSED), min_size=1, max_size=2), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([2, 4]),
    st.integers(0, UNITS + 3),
    st.booleans(),
)
def test_the_hit_leaves_least_to_compute(
    layout: Layout, data: st.DataObject, unit: int, limit: int, window_repair: bool
) -> None:
    specs = make_groups(layout, block_size=unit)
    assume(any(group.block_size == unit for group in specs))
    found = [data.draw(presence()) for _ in specs]
    hit = find_hit([Retention(s) for s in specs], found, DIGESTS, limit, window_repair=window_repair)
    expected = cheapest_hit(specs, found, DIGESTS, limit, unit=unit, window_repair=window_repair)
    assert (hit.num_hash_blocks, hit.start) == expected
    assert hit.num_hash_blocks <= hit.full_groups_reach <= hit.limit <= UNITS


@settings(max_examples=num_examples(daily=80, exhaustive=600), deadline=None)
@given(
    st.sampled_from(MIXES),
    st.data(),
    st.integers(0, UNITS + 3),
    st.booleans(),
    st.integers(0, 50),
    st.lists(st.integers(0, 80), min_size=3, max_size=3),
)
def test_a_hit_on_two_tiers_is_the_cheaper_one(
    mix: tuple[str, ...], data: st.DataObject, limit: int, window_repair: bool, token_ns: int, block_ns: list[int]
) -> None:
    """Of the best hit on the device and the best one on both tiers the one is taken that is earlier at the next token."""
    specs = [spec(name, block_size=4) for name in mix]
    retentions = [Retention(s) for s in specs]
    found = [data.draw(presence()) for _ in specs]
    host = [data.draw(presence()) for _ in specs]
    rates = LoadRates(token_ns, tuple(block_ns[: len(specs)]))
    hit = find_hit(retentions, found, DIGESTS, limit, window_repair=window_repair, host=host, rates=rates)
    choices = []
    for sets in (found, [on_device | in_host for on_device, in_host in zip(found, host, strict=True)]):
        units, start = cheapest_hit(specs, sets, DIGESTS, limit, unit=4, window_repair=window_repair)
        loads = [
            sum(digest not in on_device for digest in needed_digests(s, units, start))
            for s, on_device in zip(specs, found, strict=True)
        ]
        cost_ns = (limit * 4 - start) * token_ns + sum(n * ns for n, ns in zip(loads, rates.block_ns, strict=True))
        choices.append((cost_ns, -start, units, start, tuple(loads)))
    _, _, units, start, loaded = min(choices)
    assert (hit.num_hash_blocks, hit.start, hit.num_loaded) == (units, start, loaded if any(loaded) else ())
    assert hit.device_start == (choices[0][3] if any(loaded) else hit.start)
    assert hit.num_hash_blocks <= hit.full_groups_reach <= hit.limit <= UNITS


def needed_digests(group: GroupSpec, units: int, start: int) -> list[bytes]:
    """What a sequence that starts at this hit reads of the cache, block by block."""
    if start < units * 4 and not group.keeps_everything:  # a repair computes the windows again
        return [DIGESTS[block] for block in range(min(group.num_sink_blocks, units))]
    return [DIGESTS[block] for block in sorted(live_blocks(group, units * 4))]


def index_with(full: set[int], window: set[int], gone: set[int]) -> PrefixIndex:
    index = PrefixIndex(2, remembered=100)
    for unit in gone:
        index.groups[0][DIGESTS[unit]] = 0
        index.remove(0, [DIGESTS[unit]])
    for group, units in ((0, full), (1, window)):
        for unit in units:
            index.groups[group][DIGESTS[unit]] = unit
    return index


def outcomes(
    index: PrefixIndex, num_tokens: int, num_prompt_tokens: int | None = None, *, window_repair: bool = False
) -> dict[str, int]:
    retentions = [Retention(spec("full")), Retention(spec("window"))]
    hit = find_hit(retentions, index.groups, DIGESTS, hit_limit(num_tokens, 4), window_repair=window_repair)
    prompt = num_tokens if num_prompt_tokens is None else num_prompt_tokens
    return classify(hit, DIGESTS, index, num_tokens=num_tokens, num_prompt_tokens=prompt, block_size=4)


def test_outcomes_name_the_reason() -> None:
    index = index_with(full=set(range(6)), window={0, 1, 2}, gone={6, 7})
    # 3 units hit, 3 more are only in the full group, 2 are gone, 1 is new, and 2 tokens fill no unit
    assert outcomes(index, 9 * 4 + 2) == {
        prefix_outcome.HIT: 12,
        prefix_outcome.WINDOW_EVICTED: 12,
        prefix_outcome.FULL_EVICTED: 8,
        prefix_outcome.NEVER_SEEN: 4,
        prefix_outcome.BELOW_ALIGNMENT: 2,
    }


def test_repaired_tokens_are_counted_apart_from_hit_ones() -> None:
    index = index_with(full=set(range(12)), window={0, 1, 2}, gone=set())
    # windows of 10: at 48 tokens they begin at 39, in block 9
    assert outcomes(index, 13 * 4, window_repair=True) == {
        prefix_outcome.HIT: 36,
        prefix_outcome.REPAIRED: 12,
        prefix_outcome.LAST_TOKEN: 4,
    }
    assert outcomes(index, 13 * 4, 38, window_repair=True) == {prefix_outcome.HIT: 36, prefix_outcome.REPAIRED: 2}


def test_a_prompt_that_is_cached_whole_still_computes_its_last_hash_block() -> None:
    index = index_with(full=set(range(6)), window=set(range(6)), gone=set())
    assert outcomes(index, 24) == {prefix_outcome.HIT: 20, prefix_outcome.LAST_TOKEN: 4}


@given(
    st.sets(st.integers(0, UNITS - 1)),
    st.sets(st.integers(0, UNITS - 1)),
    st.sets(st.integers(0, UNITS - 1)),
    st.integers(1, UNITS * 4),
    st.integers(0, 30),
    st.booleans(),
)
def test_outcomes_sum_to_the_prompt(
    full: set[int], window: set[int], gone: set[int], num_prompt_tokens: int, num_resumed: int, window_repair: bool
) -> None:
    num_tokens = min(num_prompt_tokens + num_resumed, UNITS * 4)
    index = index_with(full, window, gone - full - window)
    parts = outcomes(index, num_tokens, num_prompt_tokens, window_repair=window_repair)
    assert sum(parts.values()) == num_prompt_tokens
    assert all(tokens > 0 for tokens in parts.values())


def test_the_memory_of_evictions_is_bounded() -> None:
    index = PrefixIndex(1, remembered=PLACES)
    for unit in range(PLACES + 1):
        index.groups[0][DIGESTS[unit]] = unit
        index.remove(0, [DIGESTS[unit]])
    assert [index.num_seen(DIGESTS, unit, unit + 1) for unit in range(PLACES + 1)] == [0] + [1] * PLACES
