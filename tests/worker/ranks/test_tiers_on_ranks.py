"""Host tiers of two ranks in processes of their own: blocks as bytes, loads that both ranks must have ended, copies that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transom_core.errors import RankLost, StepFailed
from transom_core.settings.settings import Settings
from transom_worker.execution.executor import ExecutorInfo, RemoteBlock, RemoteRead
from transom_worker.execution.ranks.process_launcher import RankProcesses
from transom_worker.execution.ranks.ranks_executor import RanksExecutor
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.scheduling.step import TIER_DEVICE, TIER_HOST, StepPlan, StepResult


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Iterator[tuple[RanksExecutor, ExecutorInfo]]:
    config = Settings.parse(
        model=str(tiny_model), kv_cache_memory_bytes="1MiB", num_threads=1, device="cpu", tensor_parallel_size=2
    ).engine_config()
    config = replace(config, cache=replace(config.cache, swap_space_bytes=1 << 20))
    executor = RanksExecutor(config, RankProcesses)
    try:
        yield executor, executor.start()
    finally:
        executor.shutdown()


@pytest.fixture
def executor(started: tuple[RanksExecutor, ExecutorInfo]) -> RanksExecutor:
    return started[0]


@pytest.fixture
def info(started: tuple[RanksExecutor, ExecutorInfo]) -> ExecutorInfo:
    return started[1]


def contents(info: ExecutorInfo, count: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(count * info.layout.groups[0].block_bytes) for _ in range(2)]


def copies(step_id: int, pairs: list[tuple[int, int]], source: int, target: int, ticket: int) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        copy_group=[0] * len(pairs),
        copy_source=[pair[0] for pair in pairs],
        copy_target=[pair[1] for pair in pairs],
        copy_source_tier=[source] * len(pairs),
        copy_target_tier=[target] * len(pairs),
        copy_ticket=[ticket] * len(pairs),
    )


def test_a_load_and_a_spill(executor: RanksExecutor, info: ExecutorInfo) -> None:
    first, second = contents(info, 2, seed=0), contents(info, 2, seed=1)
    assert first[0] != first[1]
    executor.write_blocks(TIER_HOST, 0, [3, 4], first)
    executor.write_blocks(TIER_DEVICE, 0, [1, 2], second)
    executor.submit(copies(0, [(1, 5), (2, 6)], TIER_DEVICE, TIER_HOST, 0))
    executor.submit(copies(1, [(3, 1), (4, 2)], TIER_HOST, TIER_DEVICE, 7))
    assert executor.read_blocks(TIER_HOST, 0, [5, 6]) == second  # after both plans, whose results are not received yet
    results = [executor.receive(), executor.receive()]
    while not any(result.loaded for result in results):  # an engine without other work polls
        executor.submit(StepPlan(step_id=len(results)))
        results.append(executor.receive())
    assert [result.step_id for result in results] == list(range(len(results)))
    assert [result.loaded for result in results if result.loaded] == [[7]]
    assert [seconds > 0 for result in results for seconds in result.load_s] == [True]
    assert executor.read_blocks(TIER_DEVICE, 0, [1, 2]) == first


def test_ranks_read_the_memory_of_other_processes_after_the_plans_in_flight(
    executor: RanksExecutor, info: ExecutorInfo
) -> None:
    if not info.memories:
        pytest.skip("NIXL is not installed")
    data, others = contents(info, 2, seed=4), info.memories[::-1]
    executor.write_blocks(TIER_HOST, 0, [3, 4], data)
    executor.submit(copies(0, [(3, 1), (4, 2)], TIER_HOST, TIER_DEVICE, 0))
    assert info.shares is not None
    blocks = tuple(RemoteBlock(0, block, TIER_DEVICE, block, TIER_HOST, block + 7) for block in (1, 2))
    executor.read_blocks(TIER_DEVICE, 0, [])  # so the copies of the plan are made on both ranks
    ends: dict[int, tuple[str, str]] = {}
    executor.on_read_end(lambda rank, end: ends.update({rank: end[:2]}))
    digests = tuple({} for _ in info.layout.groups)
    executor.begin_read(RemoteRead(read_id="r", memories=others, shares=info.shares, blocks=blocks, digests=digests))
    while len(ends) < 2:
        executor.take_read_ends()
    assert ends == {0: ("r", ""), 1: ("r", "")}
    assert executor.read_blocks(TIER_HOST, 0, [8, 9]) == data[::-1]
    assert executor.receive().step_id == 0


def test_a_dropped_plan_makes_its_copies_and_reports_its_load(executor: RanksExecutor, info: ExecutorInfo) -> None:
    data = contents(info, 1, seed=2)
    executor.write_blocks(TIER_HOST, 0, [0], data)
    executor.submit(copies(100, [(0, 3)], TIER_HOST, TIER_DEVICE, 8))
    executor.drop_in_flight()
    result = StepResult(step_id=0)
    while not result.loaded:
        executor.submit(StepPlan(step_id=result.step_id + 101))
        result = executor.receive()
    assert result.loaded == [8]
    assert executor.read_blocks(TIER_DEVICE, 0, [3]) == data


def test_a_refused_plan_is_reported_by_receive(executor: RanksExecutor, info: ExecutorInfo) -> None:
    """After earlier results; the ranks drop the plan that was made before the engine learned of it."""
    data = contents(info, 1, seed=3)
    executor.submit(StepPlan(step_id=199))
    executor.submit(StepPlan(step_id=200, version=99))
    executor.write_blocks(TIER_HOST, 0, [1], data)
    executor.submit(StepPlan(step_id=201))
    assert executor.receive().step_id == 199
    with pytest.raises(StepFailed, match="version 99"):
        executor.receive()
    executor.submit(StepPlan(step_id=202))
    assert executor.receive().step_id == 202
    assert executor.read_blocks(TIER_HOST, 0, [1]) == data


def test_wrong_pieces_are_refused(executor: RanksExecutor) -> None:
    with pytest.raises(ValueError, match="leaves"):
        executor.read_blocks(TIER_HOST, 0, [1 << 20])
    with pytest.raises(ValueError, match="given for 1 ranks; there are 2"):
        executor.write_blocks(TIER_HOST, 0, [0], [b""])
    with pytest.raises(ValueError, match="bytes on this rank, not 1"):
        executor.write_blocks(TIER_HOST, 0, [0], [b"a", b"b"])


@pytest.mark.exhaustive  # `test_failed_steps` has another plan that fails in the middle
def test_a_copy_that_fails_loses_the_ranks(executor: RanksExecutor, info: ExecutorInfo) -> None:
    executor.submit(copies(300, [(0, 1 << 20)], TIER_DEVICE, TIER_HOST, 0))
    with pytest.raises(RankLost, match="block copies of step 300 failed"):
        executor.receive()
    with pytest.raises(RankLost):
        executor.read_blocks(TIER_HOST, 0, [0])
    executor.restart()
    assert executor.read_blocks(TIER_HOST, 0, [0])[0] == bytes(info.layout.groups[0].block_bytes)


def test_a_load_has_ended_when_the_slowest_rank_has_said_so() -> None:
    reports = LoadReports(num_ranks=2)
    reports.add([1, 2], [0.1, 0.2], [])
    assert reports.deliver(StepResult(step_id=0)).loaded == []
    reports.add([2], [0.5], [1])
    result = reports.deliver(StepResult(step_id=1))
    assert (result.loaded, result.load_s, result.failed) == ([2], [0.5], [1])
    assert reports.deliver(StepResult(step_id=2)).loaded == []
