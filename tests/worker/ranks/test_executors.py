"""Both executors, of one rank in this process and of two in processes of their own: results in order, plans that fail, blocks as
bytes, and loads, which have ended when every rank has said so.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.adapter_folders import adapt_checkpoint, write_adapter
from tests.tiny_checkpoints import reference_greedy
from tests.worker.execution.hand_scheduler import HandScheduler
from transom_core.errors import RequestError, StepFailed
from transom_core.settings.settings import Settings
from transom_worker.execution.executor import Executor, ExecutorInfo, RemoteBlock, RemoteRead
from transom_worker.execution.executor_factory import create_executor
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.scheduling.step import TIER_DEVICE, TIER_HOST, StepPlan, StepResult

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module", params=[1, 2])
def started(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Executor, ExecutorInfo]]:
    settings = {"kv_cache_memory_bytes": "1MiB", "num_threads": 1, "device": "cpu", "enable_lora": True}
    config = Settings.parse(model=str(tiny_model), tensor_parallel_size=request.param, **settings).engine_config()
    executor = create_executor(replace(config, cache=replace(config.cache, swap_space_bytes=1 << 20)))
    try:
        yield executor, executor.start()
    finally:
        executor.shutdown()


@pytest.fixture
def executor(started: tuple[Executor, ExecutorInfo]) -> Executor:
    return started[0]


@pytest.fixture
def info(started: tuple[Executor, ExecutorInfo]) -> ExecutorInfo:
    return started[1]


def num_ranks(info: ExecutorInfo) -> int:
    return info.plan.tensor_parallel_size


def contents(info: ExecutorInfo, count: int, seed: int) -> list[bytes]:
    """The bytes of some blocks of the first group on each rank."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(count * info.layout.groups[0].block_bytes) for _ in range(num_ranks(info))]


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


SEQUENCES, STEPS = itertools.count(), itertools.count(1000)


def test_results_come_in_the_order_of_plans(executor: Executor, info: ExecutorInfo, tiny_model: Path) -> None:
    """The tokens of two plans are not known when the plans after them are made; a block is read after its plan."""
    hand, seq_id = HandScheduler(info.layout), next(SEQUENCES)
    hand.add(seq_id, PROMPT)
    plans = [hand.plan({seq_id: 3}), hand.plan({seq_id: 1}, by_row=True), hand.plan({seq_id: 1}, by_row=True)]
    executor.submit(plans[0])
    results = []
    for plan in (*plans[1:], copies(3, [(plans[0].delta_blocks[0], 2)], TIER_DEVICE, TIER_HOST, 0)):
        executor.submit(plan)
        results.append(executor.receive())
    spilled = executor.read_blocks(TIER_HOST, 0, [2])
    assert spilled == executor.read_blocks(TIER_DEVICE, 0, plans[0].delta_blocks[:1])
    assert all(any(part) for part in spilled)
    results.append(executor.receive())
    assert [result.step_id for result in results] == [0, 1, 2, 3]
    assert [result.sampled_ids[0] for result in results[:3]] == reference_greedy(tiny_model, PROMPT, 3)
    assert results[0].timings.forward_s > 0


def test_a_plan_that_fails_and_one_that_is_dropped_make_their_copies(executor: Executor, info: ExecutorInfo) -> None:
    """And a load of a dropped plan is reported by a later one."""
    data, hand, seq_id = contents(info, 1, seed=2), HandScheduler(info.layout), next(SEQUENCES)
    hand.add(seq_id, PROMPT)
    failing = hand.plan({seq_id: 3})
    failing.input_row = [9]
    wanted = copies(failing.step_id, [(0, 1)], TIER_HOST, TIER_HOST, 0)
    for name in ("group", "source", "target", "source_tier", "target_tier", "ticket"):
        setattr(failing, f"copy_{name}", getattr(wanted, f"copy_{name}"))
    executor.write_blocks(TIER_HOST, 0, [0], data)
    executor.submit(failing)
    executor.submit(copies(1, [(1, 2)], TIER_HOST, TIER_HOST, 0))
    with pytest.raises(StepFailed, match="Step 0 failed: ValueError: Batch row 0 takes its input from row 9"):
        executor.receive()
    executor.submit(copies(2, [(2, 3)], TIER_HOST, TIER_DEVICE, 8))
    executor.drop_in_flight()
    assert executor.read_blocks(TIER_HOST, 0, [2]) == data
    result = StepResult(step_id=0)
    while not result.loaded:  # an engine without other work polls
        executor.submit(StepPlan(step_id=next(STEPS)))
        result = executor.receive()
        assert result.step_id >= 1000  # not the dropped plan's
    assert result.loaded == [8]
    assert executor.read_blocks(TIER_DEVICE, 0, [3]) == data


def test_ranks_read_the_memory_of_other_processes_after_the_plans_in_flight(
    executor: Executor, info: ExecutorInfo
) -> None:
    if len(info.memories) < 2:
        pytest.skip("NIXL is not installed, or there is one rank")
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


def test_a_refused_plan_is_reported_by_receive(executor: Executor, info: ExecutorInfo) -> None:
    """After earlier results, and although a call has met it."""
    data = contents(info, 1, seed=3)
    executor.submit(StepPlan(step_id=199))
    executor.submit(StepPlan(step_id=200, version=99))
    executor.write_blocks(TIER_HOST, 0, [1], data)
    executor.submit(StepPlan(step_id=201))
    assert executor.receive().step_id == 199
    with pytest.raises(StepFailed, match="version 99"):
        executor.receive()
    executor.drop_in_flight()
    executor.submit(StepPlan(step_id=202))
    assert executor.receive().step_id == 202
    with pytest.raises(StepFailed, match="no plan was submitted"):
        executor.receive()
    assert executor.read_blocks(TIER_HOST, 0, [1]) == data


def test_wrong_pieces_are_refused(executor: Executor, info: ExecutorInfo) -> None:
    with pytest.raises(ValueError, match="leaves"):
        executor.read_blocks(TIER_HOST, 0, [1 << 20])
    with pytest.raises(ValueError, match=r"given for 3 ranks; there are 2|expected 1"):
        executor.write_blocks(TIER_HOST, 0, [0], [b""] * 3)
    with pytest.raises(ValueError, match="bytes on this rank, not 1"):
        executor.write_blocks(TIER_HOST, 0, [0], [b"a"] * num_ranks(info))


def test_a_load_has_ended_when_the_slowest_rank_has_said_so() -> None:
    reports = LoadReports(num_ranks=2)
    reports.add([1, 2], [0.1, 0.2], [])
    assert reports.deliver(StepResult(step_id=0)).loaded == []
    reports.add([2], [0.5], [1])
    result = reports.deliver(StepResult(step_id=1))
    assert (result.loaded, result.load_s, result.failed) == ([2], [0.5], [1])
    assert reports.deliver(StepResult(step_id=2)).loaded == []


def test_an_adapter_is_loaded_after_the_plans_before_it(
    executor: Executor, info: ExecutorInfo, tiny_model: Path, tmp_path: Path
) -> None:
    """The first sequence is computed while its slot is empty, the second with the adapter; a wrong one is refused."""
    (adapter, merged), wrong = adapt_checkpoint(tiny_model, tmp_path), write_adapter(tmp_path / "wrong")
    hand, sampled, refused = HandScheduler(info.layout), [], []
    for slot, path in ((1, adapter.path), (0, wrong)):
        seq_id = next(SEQUENCES)
        hand.add(seq_id, PROMPT, adapter_slot=1)
        executor.submit(hand.plan({seq_id: 3}))
        try:
            executor.load_adapter(slot, path)
        except RequestError as error:
            refused.append(str(error))
        sampled.append(executor.receive().sampled_ids)
    assert sampled == [reference_greedy(model, PROMPT, 1) for model in (tiny_model, merged)]
    assert sampled[0] != sampled[1]
    assert ["not safetensors" in message for message in refused] == [True]
