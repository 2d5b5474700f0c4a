"""When a worker fetches a prefix from another one, from which, and who takes which part of a request by its role."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.routing.test_placer import PROMPT, info, load, request, usage, whole
from transom_cluster.routing.fleet_index import FleetPrefixIndex
from transom_cluster.routing.placer import Placer
from transom_cluster.routing.prefix_fetches import MARGIN, prefix_bytes
from transom_cluster.routing.worker_view import HitTokens, WorkerView
from transom_core.config import RoutingPolicy, WorkerRole
from transom_core.contract import (
    AdaptivePolicy,
    FetchSpeed,
    HeavyPolicy,
    PrefixSource,
    SamplingParams,
    WindowPolicy,
    WorkerInfo,
    WorkerMessage,
)
from transom_core.contract.kv_events import CacheShape, KvUpdate
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.tiers import DISK

HIT = 1984  # of PROMPT
BLOCK_BYTES = 32_768
WINDOW = WindowPolicy(sinks=4, window=64)
BUSY: dict[str, Any] = {"num_running": 16, "waiting_tokens": 100_000}


def worker(name: str, role: WorkerRole = "both", **fields: Any) -> WorkerInfo:
    values: dict[str, Any] = {"role": role, "block_bytes": (BLOCK_BYTES,), "can_fetch": True} | fields
    return replace(info(name), **values)


def placer(
    *workers: WorkerInfo, cached: dict[str, KvUpdate] | None = None, loads: dict[str, dict[str, Any]] | None = None
) -> Placer:
    made = Placer("kv")
    for one in workers:
        made.add_worker(one.worker, one)
        its_load = load(**{"prefill_tokens_per_s": 5_000.0, **(loads or {}).get(one.worker, {})})
        assert made.update(one.worker, WorkerMessage(kv=(cached or {}).get(one.worker, whole()), load=its_load))
    return made


def merged(*updates: KvUpdate) -> KvUpdate:
    """One whole index with the blocks of several."""
    return replace(updates[0], runs=tuple(run for update in updates for run in update.runs))


def test_a_busy_workers_prefix_is_fetched_by_an_idle_one() -> None:
    made = placer(worker("a"), worker("b"), cached={"a": whole(PROMPT)}, loads={"a": BUSY})
    placed = made.place(request("r"), ("a", "b"))
    assert (placed.worker_id, placed.predicted.total) == ("b", HIT)
    assert placed.source == PrefixSource(worker="a", num_tokens=HIT)
    fetched = replace(usage(HIT), num_host_tokens=HIT, num_fetched_tokens=HIT)
    assert made.first_event("r", fetched) == 0


def test_a_prefix_comes_from_workers_that_cannot_take_the_request_but_not_from_those_that_may_not_be_asked() -> None:
    made = placer(worker("a"), worker("b"), cached={"a": whole(PROMPT)})
    source = made.place(request("r"), ["b"], sources=["a", "b"]).source
    assert source == PrefixSource(worker="a", num_tokens=HIT)
    assert made.place(request("s"), ["b"], sources=["b"]).source is None
    made.remove_worker("a")
    assert made.place(request("t"), ["b"], sources=["b"]).source is None


@pytest.mark.parametrize(
    "fields",
    [{"can_fetch": False}, {"block_bytes": ()}, {"cache": info("a", block_size=8).cache}],
    ids=["off", "unknown sizes", "other blocks"],
)
@pytest.mark.parametrize("which", ["source", "target"])
def test_workers_that_cannot_transfer_are_left_out(fields: dict[str, Any], which: str) -> None:
    source, target = worker("a"), worker("b")
    if which == "source":
        source = worker("a", **fields)
    else:
        target = worker("b", **fields)
    block_size = source.cache.block_size
    made = placer(source, target, cached={"a": whole(PROMPT, block_size=block_size)}, loads={"a": BUSY})
    assert made.place(request("r"), ["b"], sources=["a", "b"]).source is None


NOT_CACHED: dict[str, dict[str, Any]] = {
    "prompt log-probabilities": {"params": SamplingParams(prompt_logprobs=1)},
    "heavy": {"kv_policy": HeavyPolicy(sinks=4, budget=64)},
    "adaptive": {"kv_policy": AdaptivePolicy(sinks=4, min_window=32, max_window=64, threshold=0.01)},
    "measured": {"kv_policy": WINDOW, "kv_quality": True},
}


@pytest.mark.parametrize("fields", NOT_CACHED.values(), ids=NOT_CACHED)
def test_requests_that_read_no_prefix_cache_fetch_nothing_and_are_computed_where_they_decode(
    fields: dict[str, Any],
) -> None:
    both = {"a": merged(whole(PROMPT), whole(PROMPT, policy=WINDOW))}
    made = placer(worker("a"), worker("b"), cached=both)
    assert made.place(request("r", **fields), ["b"], sources=["a", "b"]).source is None
    made = disaggregated(cached={"p": both["a"]})
    for number in range(4):
        placed = made.place(request(f"r{number}", **fields), ("p", "d"))
        assert (placed.worker_id, placed.source, placed.is_prefill_only) == ("d", None, False)


def test_a_windows_prefix_is_fetched_from_where_it_is_cached_under_the_same_policy() -> None:
    cached = {"a": whole(PROMPT), "c": whole(PROMPT, policy=WINDOW)}
    made = placer(worker("a"), worker("b"), worker("c"), cached=cached)

    def source(policy: WindowPolicy | None) -> PrefixSource | None:
        return made.place(request("r", kv_policy=policy), ["b"], sources=["a", "b", "c"]).source

    assert source(WINDOW) == PrefixSource(worker="c", num_tokens=HIT)
    assert source(None) == PrefixSource(worker="a", num_tokens=HIT)
    assert source(WindowPolicy(sinks=4, window=65)) is None


def test_a_window_is_weighed_by_its_own_bytes() -> None:
    """At a rate at which a whole prefix is not worth fetching, the window of an equal prompt is."""
    slow = load(prefill_tokens_per_s=5_000.0, fetch_speeds={"": FetchSpeed(bytes_per_s=5e6)})
    cached = {"a": merged(whole(PROMPT), whole(PROMPT, policy=WINDOW))}
    made = placer(worker("a"), worker("b"), cached=cached)
    made.update("b", WorkerMessage(load=slow))
    assert made.place(request("r"), ["b"], sources=["a", "b"]).source is None
    assert made.place(request("s", kv_policy=WINDOW), ["b"], sources=["a", "b"]).source is not None
    view = made.workers["a"]
    num_blocks = 1 + 4 + 1  # of the sinks, and of 63 tokens that begin within a block
    assert prefix_bytes(view, HIT, WINDOW) == ((num_blocks - 1) * BLOCK_BYTES, 0.0)  # at HIT a block begins
    assert prefix_bytes(view, HIT, WindowPolicy(sinks=4, window=66)) == (num_blocks * BLOCK_BYTES, 0.0)
    assert prefix_bytes(view, HIT) == (0, BLOCK_BYTES / 16)


def test_the_rule_weighs_seconds_and_has_a_margin_that_it_drops_while_it_fetches() -> None:
    wait_s, bytes_per_s = FetchSpeed()
    fetch_s = wait_s + HIT / 16 * BLOCK_BYTES / bytes_per_s
    made = placer(worker("a"), worker("b"), cached={"a": whole(PROMPT)})

    def fetches(compute_s: float, name: str = "r") -> bool:
        rate = HIT / compute_s
        for one in "ab":
            made.update(one, WorkerMessage(load=load(prefill_tokens_per_s=rate)))
        return made.place(request(name), ["b"], sources=["a", "b"]).source is not None

    assert not fetches(fetch_s * 0.9 * MARGIN)
    assert fetches(fetch_s * 1.1 * MARGIN)
    assert fetches(fetch_s * 0.9 * MARGIN)  # it fetched the last time
    assert not fetches(fetch_s * 0.9)
    assert not fetches(fetch_s * 0.9 * MARGIN)
    for slow in (FetchSpeed(bytes_per_s=bytes_per_s / 10), FetchSpeed(wait_s=2 * fetch_s)):
        its_load = load(prefill_tokens_per_s=HIT / (fetch_s * 1.1 * MARGIN), fetch_speeds={"": slow})
        made.update("b", WorkerMessage(load=its_load))
        assert made.place(request("s"), ["b"], sources=["a", "b"]).source is None


def test_a_rate_holds_for_a_node_and_a_tier() -> None:
    """From the slow node the target computes; from the other one it fetches, at its speed of all fetches."""
    made = placer(worker("near", node="n"), worker("far", node="f"), worker("t"))
    slow = load(prefill_tokens_per_s=5_000.0, fetch_speeds={"f/device": FetchSpeed(bytes_per_s=1e6)})
    made.update("t", WorkerMessage(load=slow))
    for name, place in (("near", "n/device"), ("far", "")):
        made.update(name, WorkerMessage(kv=whole(PROMPT)))
        source = made.place(request("r"), ["t"], sources=[name, "t"]).source
        assert ("" if source is None else source.place) == place


def test_sources_with_equal_hits_take_turns() -> None:
    made = placer(worker("a"), worker("b"), worker("c"), cached={"a": whole(PROMPT), "b": whole(PROMPT)})
    placed = [made.place(request(f"r{i}"), ["c"], sources=["a", "b", "c"]).source for i in range(4)]
    assert {one.worker for one in placed if one is not None} == {"a", "b"}


def test_the_bytes_are_those_of_live_blocks() -> None:
    groups = (
        GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=4),
        GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(1,), block_size=4, window=10),
        GroupSpec(name="sinks", kind=GroupKind.SINKS_WINDOW, layers=(2,), block_size=4, window=10, sinks=6),
        GroupSpec(name="chunk", kind=GroupKind.CHUNK, layers=(3,), block_size=4, chunk=16),
    )
    shape = CacheShape(groups=groups, block_size=4, window_repair=True, enable_prefix_caching=True)
    sizes = (1_000, 100, 10, 1)
    view = WorkerView("a", worker("a", cache=shape, block_bytes=sizes), FleetPrefixIndex())
    for boundary in range(40):
        live = []
        for retention in map(Retention, groups):
            n = boundary * 4
            blocks = {block for begin, end in retention.spec.live(n) for block in range(begin // 4, -(-end // 4))}
            blocks |= set(range(min(retention.num_sink_blocks, boundary)))
            live.append(len(blocks))
        fixed, token = prefix_bytes(view, boundary * 4)
        assert fixed + round(token * boundary * 4) == sum(n * size for n, size in zip(live, sizes, strict=True))


def disaggregated(**options: object) -> Placer:
    return placer(worker("p", "prefill"), worker("d", "decode"), **options)  # type: ignore[arg-type]


def test_prompts_go_to_prefill_workers_and_streams_to_decode_workers() -> None:
    made = disaggregated()
    first = made.place(request("r"), ("p", "d"))
    assert (first.worker_id, first.is_prefill_only, first.decoder, first.source) == ("p", True, "d", None)
    made.ended("r")
    made.update("p", WorkerMessage(kv=whole(PROMPT, version=2)))
    second = made.place(request("r+1", resumed_output_ids=(7,)), ("p", "d"))
    assert (second.worker_id, second.is_prefill_only) == ("d", False)
    assert second.source == PrefixSource(worker="p", num_tokens=2000)


@pytest.mark.parametrize(("policy", "decoder"), [("kv", "e"), ("round_robin", None)])
def test_a_decoder_is_named_where_the_policy_will_look_at_its_blocks(policy: RoutingPolicy, decoder: str | None):
    made = placer(worker("p", "prefill"), worker("d", "decode"), worker("e", "decode"), loads={"d": BUSY})
    made.policy = policy
    assert made.place(request("r"), ("p", "d", "e")).decoder == decoder


def test_short_prompts_and_cached_ones_stay_with_decode_workers() -> None:
    made = disaggregated(cached={"d": whole(PROMPT)})
    for prompt in (PROMPT[:40], PROMPT):
        placed = made.place(request("r", prompt), ("p", "d"))
        assert (placed.worker_id, placed.is_prefill_only) == ("d", False)


def test_a_prompt_is_computed_where_it_delays_least() -> None:
    """A decode worker with streams takes short prompts only; one that would be later at the prefill worker it takes in any case."""
    short = PROMPT[:160]  # 0.03 s here, and 0.014 s to fetch

    def taker(prompt: tuple[int, ...], **loads: dict[str, Any]) -> str:
        return disaggregated(loads=loads).place(request("r", prompt), ("p", "d")).worker_id

    slow: dict[str, Any] = {"fetch_speeds": {"": FetchSpeed(wait_s=0.03)}}
    assert taker(short, d=slow) == "d"
    assert taker(short, d={**slow, "num_running": 4}) == "p"
    assert taker(PROMPT, p={"waiting_tokens": 5 * len(PROMPT)}, d={"num_running": 8}) == "p"
    assert taker(PROMPT, p={"waiting_tokens": 9 * len(PROMPT)}, d={"num_running": 8}) == "d"


def test_a_prompt_that_was_handed_over_is_fetched_in_any_case() -> None:
    made = disaggregated(cached={"p": whole(PROMPT)}, loads={"d": {"fetch_speeds": {"": FetchSpeed(wait_s=60.0)}}})
    assert made.place(request("r+1", resumed_output_ids=(7,)), ("p", "d")).source is not None
    assert made.place(request("r"), ["d"], sources=["p", "d"]).source is None


@pytest.mark.parametrize(("left", "is_new"), [("p", True), ("p", False), ("d", True), ("d", False)])
def test_a_worker_does_both_where_no_other_role_is_there(left: str, *, is_new: bool) -> None:
    made = disaggregated()
    resumed = () if is_new else (7,)
    placed = made.place(request("r", resumed_output_ids=resumed), [left])
    assert (placed.worker_id, placed.is_prefill_only) == (left, False)


def test_a_decode_worker_that_cannot_fetch_computes_prompts_itself() -> None:
    placed = placer(worker("p", "prefill"), worker("d", "decode", can_fetch=False)).place(request("r"), ("p", "d"))
    assert (placed.worker_id, placed.is_prefill_only) == ("d", False)


def test_every_policy_respects_roles() -> None:
    for policy in ("kv", "round_robin"):
        made = Placer(policy)
        for one in (worker("p", "prefill"), worker("q", "prefill"), worker("d", "decode"), worker("e", "decode")):
            made.add_worker(one.worker, one)
        names = ("p", "q", "d", "e")
        placed = [made.place(request("n"), names).worker_id for _ in range(30)]  # it leaves before it is placed again
        assert {*placed} <= {"p", "q"}
        resumed = [request(f"o{i}", resumed_output_ids=(1,)) for i in range(30)]
        assert {made.place(one, names).worker_id for one in resumed} <= {"d", "e"}


def on_disk(update: KvUpdate, *, read_ns: int) -> KvUpdate:
    """The same blocks, on a disk whose reads take so long for each."""
    rates = LoadRates(200_000, (1_000,), (read_ns,))
    return replace(update, runs=tuple(run._replace(tier=DISK) for run in update.runs), rates=rates)


def with_disk(name: str) -> WorkerInfo:
    return worker(name, cache=replace(info(name).cache, has_host_tier=True, has_disk_tier=True))


def test_a_warm_disk_attracts_its_requests_and_slow_or_short_reads_do_not() -> None:
    made = placer(with_disk("a"), with_disk("b"), cached={"b": on_disk(whole(PROMPT), read_ns=100_000)})
    for number in range(4):
        placed = made.place(request(f"r{number}"), ["a", "b"])
        assert (placed.worker_id, placed.reason) == ("b", "longest_hit")
        assert placed.predicted == HitTokens(device=0, host=0, disk=HIT)
        made.ended(f"r{number}")
    slow = placer(with_disk("a"), cached={"a": on_disk(whole(PROMPT), read_ns=10_000_000)})
    assert slow.place(request("r"), ["a"]).predicted.total == 0
    short = placer(with_disk("a"), cached={"a": on_disk(whole(PROMPT[:127]), read_ns=1)})
    assert short.place(request("r"), ["a"]).predicted.total == 0


def test_the_time_of_reading_counts_in_the_cost_of_a_placement() -> None:
    """A worker that reads the prefix for longer than another one would compute it in is not taken for its hit."""
    reads = on_disk(whole(PROMPT), read_ns=3_000_000)  # 0.37 s, where its own rate says that computing takes 0.4 s
    fast = {"prefill_tokens_per_s": 20_000.0}
    made = placer(with_disk("a"), with_disk("b"), cached={"b": reads}, loads={"a": fast, "b": fast})
    assert made.place(request("r"), ["a", "b"]).worker_id == "a"


def test_what_only_a_disk_has_is_no_source_and_a_read_is_weighed_against_a_fetch() -> None:
    made = placer(with_disk("a"), with_disk("b"), cached={"a": on_disk(whole(PROMPT), read_ns=100_000)})
    assert made.place(request("r"), ["b"], sources=["a", "b"]).source is None
    for read_ns, fetches in ((1_000, False), (2_500_000, True)):
        cached = {"a": whole(PROMPT), "b": on_disk(whole(PROMPT), read_ns=read_ns)}
        placed = placer(with_disk("a"), with_disk("b"), cached=cached).place(request("r"), ["b"], sources=["a", "b"])
        assert (placed.source is not None) == fetches
        assert placed.predicted == (HitTokens(0, peer=HIT) if fetches else HitTokens(0, disk=HIT))
