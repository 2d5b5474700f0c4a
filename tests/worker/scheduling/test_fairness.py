"""No request starves and no pool thrashes: priorities age; preempted requests keep their place and their cached blocks."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.manager import KvCache


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


def crowd(num_pages: int, *, num_requests: int = 24) -> Driver:
    """Short prompts and long answers: everything would be admitted, and then does not fit."""
    driver = Driver(layout(["full", "window"], num_pages=num_pages), max_num_seqs=16, max_num_batched_tokens=64)
    for number in range(num_requests):
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
    plan = driver.schedule()
    assert plan is not None
    assert plan.start == [(num_known - 1) // 4 * 4]
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
