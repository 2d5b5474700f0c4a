"""What a router learns from workers' messages and from its own placements, and what follows for the next request."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from prometheus_client import generate_latest

from tests.cluster.routing.test_policy import columns
from tests.prefix_chains import chain_of
from transom_cluster.routing import prompt_hashes
from transom_cluster.routing.placer import PlacementDecision, Placer
from transom_cluster.routing.prompt_hashes import PromptChain
from transom_cluster.routing.worker_view import HitTokens
from transom_cluster.telemetry.routing_metrics import RoutingMetrics
from transom_core.contract import (
    Adapter,
    KvPolicy,
    Request,
    SamplingParams,
    Usage,
    WorkerInfo,
    WorkerLoad,
    WorkerMessage,
)
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_core.telemetry.metric_families import MetricFamilies

WORKERS = ("a", "b", "c")
PROMPT = tuple(range(1000, 3000))
HIT = 1984  # of PROMPT: whole blocks, and a token left to compute


def info(worker: str, block_size: int = 16) -> WorkerInfo:
    group = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=block_size)
    shape = CacheShape(groups=(group,), block_size=block_size, window_repair=True, enable_prefix_caching=True)
    return WorkerInfo(worker=worker, max_model_len=8192, vocab_size=5000, cache=shape)


def whole(
    *prompts: tuple[int, ...],
    version: int = 1,
    block_size: int = 16,
    salt: str | None = None,
    policy: KvPolicy | None = None,
    adapter: str | None = None,
) -> KvUpdate:
    root = {"cache_salt": salt, "kv_policy": None if policy is None else policy.text, "adapter": adapter}
    digests = tuple(digest for prompt in prompts for digest in chain_of(prompt, block_size, **root))
    return KvUpdate(after=version, version=version, runs=(KvRun("added", 0, digests),), whole=True)


def load(**fields: object) -> WorkerLoad:
    return WorkerLoad(**({"max_num_seqs": 16} | fields))  # type: ignore[arg-type]


def placer(policy: str = "kv", *, cached: dict[str, KvUpdate] | None = None, **options: object) -> Placer:
    made = Placer(policy, **options)  # type: ignore[arg-type]
    for name in WORKERS:
        made.add_worker(name, info(name))
        assert made.update(name, WorkerMessage(kv=(cached or {}).get(name, whole()), load=load()))
    return made


def request(name: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    params = fields.pop("params", SamplingParams())
    return Request(request_id=name, prompt_token_ids=prompt, params=params, seed=0, **fields)  # type: ignore[arg-type]


def usage(num_cached_tokens: int) -> Usage:
    return Usage(num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=num_cached_tokens)


def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of each call that hashes some."""
    hashed: list[int] = []

    def counting(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
        hashed.append(len(token_ids))
        extend_chain(chain, root, token_ids, block_size)

    monkeypatch.setattr(prompt_hashes, "extend_chain", counting)
    return hashed


def others(count: int) -> list[tuple[int, ...]]:
    """Prompts without a common block."""
    return [tuple(range(at, at + 512)) for at in range(3_000, 3_000 + count * 600, 600)]


def test_a_request_goes_where_its_prompt_is_cached_and_is_told_what_will_be_found() -> None:
    made = placer(cached={"b": whole(PROMPT, version=7)})
    decision = PlacementDecision(worker_id="b", reason="longest_hit", predicted=HitTokens(HIT))
    assert made.place(request("r"), WORKERS) == decision
    assert made.first_event("r", usage(HIT - 64)) == 64
    assert made.first_event("r", usage(HIT)) is None  # once
    assert made.first_event("unknown", usage(0)) is None


def test_resumed_tokens_are_tokens_but_not_the_prompts() -> None:
    resumed = tuple(range(100))
    made = placer(cached={"b": whole(PROMPT + resumed)})
    placed = made.place(request("r", resumed_output_ids=resumed), WORKERS)
    assert (placed.worker_id, placed.predicted.total) == ("b", len(PROMPT))
    assert made.workers["b"].requests["r"].num_to_compute == 4


def test_log_probabilities_of_the_prompt_read_no_cache_and_salts_and_adapters_have_their_own() -> None:
    made = placer(cached={"b": whole(PROMPT)})
    assert made.place(request("r", params=SamplingParams(prompt_logprobs=1)), WORKERS).predicted.total == 0
    assert made.place(request("s", cache_salt="tenant"), WORKERS).predicted.total == 0
    salted = placer(cached={"c": whole(PROMPT, salt="tenant")})
    assert salted.place(request("s", cache_salt="tenant"), WORKERS).worker_id == "c"
    adapted, adapter = placer(cached={"c": whole(PROMPT, adapter="1f")}), Adapter(name="a", path="/a", identity="1f")
    assert adapted.place(request("a", adapter=replace(adapter, name="other")), WORKERS).predicted.total == HIT
    assert adapted.place(request("b", adapter=replace(adapter, identity="2f")), WORKERS).predicted.total == 0


def test_workers_of_other_block_sizes_are_searched_with_their_own_hashes() -> None:
    made = placer(cached={"a": whole(PROMPT[:800])})
    made.add_worker("d", info("d", block_size=64))
    made.update("d", WorkerMessage(kv=whole(PROMPT, block_size=64), load=load()))
    placed = made.place(request("r"), (*WORKERS, "d"))
    assert (placed.worker_id, placed.predicted.total) == ("d", 31 * 64)


def test_equal_prompts_are_hashed_once_and_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashed(monkeypatch)
    made = placer(cached={"a": whole(PROMPT), "b": whole(PROMPT), "c": whole(PROMPT)})
    predicted = [made.place(request(f"r{choice}"), WORKERS).predicted.total for choice in range(4)]
    assert (predicted, hashed) == ([HIT] * 4, [2000])
    hashed.clear()
    changed = (
        request("salted", cache_salt="tenant"),
        request("resumed", cache_salt="tenant", resumed_output_ids=(1, 2)),
        request("plain", resumed_output_ids=(1, 2)),
        request("longer", (*PROMPT, 1)),
    )
    predicted = [made.place(one, WORKERS).predicted.total for one in changed]
    assert (predicted, hashed) == ([0, 0, 2000, 2000], [2000] * 4)


def test_a_prompt_is_hashed_as_far_as_a_worker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashed(monkeypatch)
    long = tuple(i % 5_000 for i in range(100_000))
    made = placer(cached={"a": whole(long[:3_000])})
    assert made.place(request("r", long), ["a"]).predicted.total == 2_992
    assert sum(hashed) <= 2 * 3_000
    hashed.clear()
    assert (made.place(request("s", long[1:]), WORKERS).predicted.total, sum(hashed)) == (0, 2_048)


@pytest.mark.parametrize("policy", ["kv", "round_robin"])
def test_a_burst_without_hits_spreads_before_any_load_is_reported(policy: str) -> None:
    made = placer(policy)
    counts = Counter(made.place(request(f"r{i}", prompt), WORKERS).worker_id for i, prompt in enumerate(others(12)))
    assert counts == dict.fromkeys(WORKERS, 4)


def test_a_prompt_that_is_cached_nowhere_comes_back_to_its_home_by_any_router() -> None:
    places = set()
    for seed in range(5):
        made = placer(seed=seed)
        for i in range(3):
            places.add(made.place(request(f"r{i}"), WORKERS).worker_id)
            made.ended(f"r{i}")
    assert len(places) == 1


def test_answers_that_run_weigh_too() -> None:
    made, counts = placer(), Counter[str]()
    for i, prompt in enumerate(others(60)):
        counts[made.place(request(f"r{i}", prompt[:64]), WORKERS).worker_id] += 1
        made.first_event(f"r{i}", usage(0))
    assert all(17 <= counts[name] <= 23 for name in WORKERS)


def test_what_other_routers_sent_counts_and_what_this_one_sent_is_not_counted_twice() -> None:
    made = placer()
    worker = made.workers["a"]
    for i in range(2):
        assert made.place(request(f"r{i}"), ("a",)).worker_id == "a"
    assert worker.candidate(0).queue_tokens == 4000
    made.update("a", WorkerMessage(load=load(num_waiting=2, waiting_tokens=4000), taken=("r0", "r1")))
    assert worker.candidate(0).queue_tokens == 4000
    made.update("a", WorkerMessage(load=load(num_waiting=5, waiting_tokens=9000)))
    assert worker.candidate(0).queue_tokens == 9000
    made.update("a", WorkerMessage(load=load(num_running=2, waiting_tokens=1500)))  # the others have left
    assert (worker.candidate(0).queue_tokens, worker.candidate(0).num_requests) == (1500, 2)
    for i in range(2):
        made.first_event(f"r{i}", usage(0))
    assert worker.candidate(0).queue_tokens == 1500
    made.update("a", WorkerMessage(load=load(num_running=2)))
    assert worker.candidate(0).queue_tokens == 0


def test_a_report_that_was_written_before_a_request_arrived_does_not_hide_it() -> None:
    made = placer()
    made.place(request("r"), ("a",))
    for _ in range(3):  # however many of them come
        made.update("a", WorkerMessage(load=load()))
        assert made.workers["a"].candidate(0).queue_tokens == len(PROMPT)
    made.update("a", WorkerMessage(load=load(), taken=("r",)))  # it was computed, and its first event is on its way
    assert made.workers["a"].candidate(0).queue_tokens == 0


def test_requests_that_no_report_counts_come_on_top_of_the_reported_ones() -> None:
    """Otherwise several routers would send their requests to one worker until each has as many there as all together."""
    made = placer()
    made.update("a", WorkerMessage(load=load(num_running=10)))
    for i in range(3):
        made.place(request(f"r{i}"), ("a",))
    assert made.workers["a"].candidate(0).num_requests == 13
    made.update("a", WorkerMessage(load=load(num_running=11, num_waiting=1), taken=("r0", "r1")))
    assert made.workers["a"].candidate(0).num_requests == 13
    made.ended("r2")
    assert made.workers["a"].candidate(0).num_requests == 12


def test_metrics_tell_placements_predictions_and_mirrors_until_a_worker_goes() -> None:
    families = MetricFamilies(model="m", router="front")
    made = placer(cached={"a": whole(PROMPT, version=3)}, observer=RoutingMetrics(families))
    made.place(request("r"), WORKERS)
    made.first_event("r", usage(HIT - 100))

    def value(name: str, **labels: str) -> float | None:
        return families.registry.get_sample_value(name, {"model": "m", "router": "front", **labels})

    assert value("transom_router_placements_total", policy="kv", worker="a", reason="longest_hit") == 1
    assert value("transom_router_placement_seconds_count") == 1
    assert value("transom_router_predicted_hit_tokens_total", tier="device") == HIT
    assert value("transom_router_actual_hit_tokens_total", tier="device") == HIT - 100
    assert value("transom_router_hit_error_tokens_sum") == 100
    assert value("transom_router_mirror_blocks", worker="a") == 125
    assert value("transom_router_mirror_version", worker="a") == 3
    assert not made.update("a", WorkerMessage(kv=KvUpdate(after=5, version=6, runs=())))  # a gap
    assert value("transom_router_resyncs_total", worker="a") == 1
    assert made.place(request("r"), ("a",)).predicted.total == 0
    made.remove_worker("a")
    assert 'worker="a"' not in generate_latest(families.registry).decode()


def test_what_the_policies_see_is_what_each_worker_is_now() -> None:
    rng = random.Random(0)
    made, names = placer(), list(WORKERS)
    placed: list[str] = []
    for i in range(400):
        match rng.randrange(7):
            case 0:
                name = rng.choice(names)
                taken = tuple(rng.sample(placed, min(2, len(placed))))
                made.update(name, WorkerMessage(load=load(num_running=i, waiting_tokens=10 * i), taken=taken))
            case 1 if len(names) < 40:
                names.append(f"w{i}")
                made.add_worker(names[-1], info(names[-1], block_size=rng.choice([16, 32])))
            case 2 if len(names) > 1:
                made.remove_worker(names.pop(rng.randrange(len(names))))
            case 3 if placed:
                made.first_event(rng.choice(placed), usage(0))
            case 4 if placed:
                made.ended(placed.pop(rng.randrange(len(placed))))
            case _:
                placed.append(f"r{i}")
                among = rng.sample(names, rng.randrange(1, len(names) + 1))
                assert made.place(request(placed[-1], (i, *PROMPT)), among).worker_id in among
        table, shown = made._table, rng.sample(names, rng.randrange(1, len(names) + 1))
        selection = table.select(shown)
        seen = table.candidates(selection, np.arange(len(shown)))
        expected = columns([made.workers[name].candidate(at) for at, name in enumerate(sorted(shown))])
        assert [worker.worker_id for worker in selection.workers] == sorted(shown)
        for field in ("num_to_compute", "facts", "seeds"):
            assert np.array_equal(getattr(seen, field), getattr(expected, field))


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300).map(tuple)


@given(
    TOKENS,
    # around whole steps of the hash, which are 24 and 56 tokens
    st.sampled_from([1, 2, 3, 7, 8, 16, 23, 24, 25, 32, 57, 64]),
    st.lists(st.integers(0, 300), max_size=3),
)
def test_digests_are_the_workers_in_whatever_pieces(
    token_ids: tuple[int, ...], block_size: int, pieces: list[int]
) -> None:
    root = chain_root(block_size, cache_salt="tenant")
    expected = chain_of(token_ids, block_size, cache_salt="tenant")
    chain = PromptChain(token_ids, root, block_size)
    assert chain.num_blocks == len(expected)
    for num_blocks in pieces:
        known = chain.hashed(num_blocks)[: min(num_blocks, len(expected))]
        assert known.tobytes() == b"".join(expected[:num_blocks])
    assert [chain.digest(block) for block in range(len(expected))] == expected
