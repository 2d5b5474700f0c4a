"""Admission: what is refused, with which numbers and field; no request starves and no pool thrashes, since priorities age, and
preempted requests keep their place and their cached blocks."""

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_core.contract import CONTRACT_VERSION, Request
from transom_core.errors import Overloaded, PromptTooLong, RequestError, RequestTooLarge, WorkerLost
from transom_core.kv_cache.hashing import extend_chain
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.request_validation import check_tokens


def driver(num_pages: int = 100, **config: Any) -> Driver:
    return Driver(layout(["full", "window"], num_pages=num_pages), **config)


def test_a_request_of_another_version_goes_to_another_worker() -> None:
    with pytest.raises(WorkerLost, match=f"version {CONTRACT_VERSION - 1}; this worker speaks {CONTRACT_VERSION}"):
        check_tokens(replace(request("old", range(3)), version=CONTRACT_VERSION - 1), vocab_size=100)


def test_a_prompt_needs_room_for_one_more_token() -> None:
    driver().add(request("fits", range(95)))
    with pytest.raises(PromptTooLong, match=r"has 96 tokens.*length is 96") as caught:
        driver().add(request("long", range(96)))
    assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLong, match="and 2 resumed output tokens"):
        driver().add(request("long", range(94), resumed=(1, 2)))


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    small = driver(num_pages=6)
    capacity = small.scheduler.cache.capacity.longest_tokens(small.scheduler.max_model_len)
    assert 20 < capacity < 95
    small.add(request("fits", range(20), capacity - 20))
    with pytest.raises(
        RequestTooLarge, match=rf"20 prompt, up to {capacity - 19} output.*enough for {capacity}"
    ) as caught:
        small.add(request("large", range(20), capacity - 19))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestTooLarge) as caught:
        small.add(request("large", range(capacity), 5))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestTooLarge):
        small.add(request("open", range(20), None))  # unset max_tokens may grow to the model's length
    small.run()
    assert small.finished == ["fits"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (request("r", []), "prompt"),
        (request("r", [1], 2, resumed=(3, 4)), "resumed_output_ids"),
        (replace(request("r", [1]), client="x" * 65), "client"),
        (replace(request("r", [1]), client_weight=0.0), "client_weight"),
        (replace(request("r", [1]), client_weight=float("nan")), "client_weight"),
        (replace(request("r", [1]), client_weight=float("inf")), "client_weight"),
    ],
)
def test_requests_that_make_no_sense_are_refused(item: Request, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        driver().add(item)
    assert caught.value.param == param


def test_the_queue_is_bounded_beyond_the_free_running_slots() -> None:
    full = driver(max_num_seqs=2, max_waiting=3)
    for i in range(5):
        full.add(request(str(i), [i + 1]))
    with pytest.raises(Overloaded, match="limit is 3") as caught:
        full.add(request("6", [1]))
    assert caught.value.retry_after_s > 0
    full.run()
    assert len(full.finished) == 5


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler = driver()
    scheduler.add(request("r", [1]))
    with pytest.raises(RequestError, match="already"):
        scheduler.add(request("r", [1]))
    scheduler.run()
    scheduler.add(request("r", [1]))


def test_a_client_that_leaves_while_blocked_is_forgotten() -> None:
    busy = driver(num_pages=8)
    for name, first in (("one", 0), ("other", 100)):
        busy.add(request(name, range(first, first + 80), 15, client=name))
    blocked = busy.scheduler.admission.blocked
    while busy.schedule() and not blocked:
        busy.receive()
    (client,) = blocked
    busy.abort(client.name)
    assert not blocked
    busy.run()


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["resumed", "late", "early", "urgent"]), ("priority", ["resumed", "urgent", "early", "late"])],
)
def test_the_order_of_service(policy: str, order: list[str]) -> None:
    """A stream that migrated from a lost worker does not stand at the end of the queue: its client is reading it."""
    driver = Driver(layout(["full"], num_pages=200), max_num_seqs=1, policy=policy)
    driver.now_s = 0.0
    driver.add(request("runs", range(5), 6, priority=-9))
    driver.step()
    for name, priority, arrival_s in (("late", 1, 2.0), ("early", 1, 1.0), ("urgent", 0, 3.0)):
        driver.now_s = arrival_s
        driver.add(request(name, range(3), 2, priority=priority))
    driver.add(request("resumed", range(5), 4, resumed=(7, 8), waited_s=60.0))
    driver.run()
    assert driver.finished == ["runs", *order]


def crowd(num_pages: int) -> Driver:
    """Short prompts and long answers: everything would be admitted, and then does not fit."""
    driver = Driver(layout(["full", "window"], num_pages=num_pages), max_num_seqs=16, max_num_batched_tokens=64)
    for number in range(24):
        driver.add(request(str(number), [number, *range(7)], 60))
    driver.run()
    return driver


def num_needed(driver: Driver) -> int:
    return sum(item.num_prompt_tokens + len(driver.tokens[name]) - 1 for name, item in driver.requests.items())


@pytest.mark.parametrize(
    "num_pages", [pytest.param(12, marks=pytest.mark.exhaustive), 24, pytest.param(40, marks=pytest.mark.exhaustive)]
)
def test_a_tight_pool_does_not_thrash(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission leaves a block for each running sequence; without that, far more tokens are computed twice."""
    driver = crowd(num_pages)
    preemptions = driver.scheduler.work.preemptions["recompute"]
    assert 0 < preemptions <= 2 * len(driver.requests)
    assert driver.executor.num_computed <= 1.5 * num_needed(driver)

    extend = KvCache.extend

    def careless(cache: KvCache, blocks: SequenceBlocks, end: int, *, reserve: int = 0, compact: bool = True) -> bool:
        return extend(cache, blocks, end, compact=compact)

    monkeypatch.setattr(KvCache, "extend", careless)
    thrashing = crowd(num_pages)
    assert thrashing.scheduler.work.preemptions["recompute"] > 1.5 * preemptions


def test_a_preempted_request_continues_where_its_cached_blocks_end() -> None:
    """Blocks that no other sequence needed meanwhile still have what it had computed."""
    driver = Driver(layout(["full", "window"], num_pages=200))
    driver.add(request("a", range(30), 20))
    for _ in range(8):
        driver.step()
    sequence = driver.scheduler.by_request["a"]
    num_known = len(sequence.token_ids)
    driver.scheduler.admission.preempt(sequence)
    assert driver.next_plan().start == [(num_known - 1) // 4 * 4]
    driver.run()
    assert driver.executor.num_computed <= num_needed(driver) + 4


def test_a_request_that_does_not_fit_is_not_tried_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try costs as much as its hit is long; windows that slide on free a block in most steps, and take one."""
    driver = Driver(layout(["full", "window"], num_pages=14), max_num_batched_tokens=128, max_chunk=128)
    for name in "abc":
        driver.add(request(name, [ord(name)] * 8, 40))
    for _ in range(4):
        driver.step()
    tried = []
    begin = KvCache.begin

    def counted(cache: KvCache, *args: object, **options: object) -> SequenceBlocks:
        tried.append(len(driver.finished))
        return begin(cache, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KvCache, "begin", counted)
    driver.add(request("large", range(84), 10))
    num_steps = 0
    while not driver.outputs["large"]:
        driver.step()
        num_steps += 1
    assert num_steps > 30
    assert len(tried) < num_steps / 3
    assert driver.scheduler.work.preemptions["recompute"] == 0
    driver.run()


def test_a_request_is_tried_again_when_a_read_of_many_blocks_has_ended() -> None:
    """Beside a decoding sequence, which frees nothing."""
    driver = Driver(layout(["full"], num_pages=60), max_model_len=1000, max_num_batched_tokens=64)
    cached = request("cached", range(2000, 2400), 2)
    driver.add(cached)
    driver.run()
    driver.add(request("a", range(200), 300))
    while not driver.tokens["a"]:
        driver.step()
    chain: list[bytes] = []
    extend_chain(chain, driver.scheduler.root_of(cached), cached.prompt_token_ids, BLOCK)
    cache = driver.scheduler.cache
    export = cache.tiers.exports.begin(chain, cache.find(chain, 401))
    assert export is not None
    driver.add(request("b", range(3000, 3400), 4))
    for _ in range(20):
        driver.step()
    assert not driver.tokens["b"]
    cache.tiers.exports.end(export)
    for _ in range(10):
        driver.step()
    assert driver.tokens["b"]
    driver.run()
