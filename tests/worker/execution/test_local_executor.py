"""Order, failure and shutdown of the in-process executor; limits it reports."""

import pytest

from tests.worker.execution.hand_scheduler import HandScheduler, engine_config
from tests.worker.execution.toy_decoder import VOCABULARY, ToyDecoder, layer, load_toy
from transom_core.errors import ConfigError, StepFailed
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.scheduling.step import TIER_DEVICE, TIER_HOST, StepPlan


def start(**settings: object) -> tuple[LocalExecutor, HandScheduler, ToyDecoder]:
    loaded = load_toy([layer(), layer(6)], eos=(2, 4), max_position=100)
    executor = LocalExecutor(engine_config(**settings), loaded)  # type: ignore[arg-type]
    info = executor.start()
    assert isinstance(loaded.model, ToyDecoder)
    assert (info.vocab_size, info.eos_token_ids) == (VOCABULARY, (2, 4))
    assert (info.memory.weight_bytes, info.memory.kv_bytes) == (1000, info.layout.slab_bytes)
    return executor, HandScheduler(info.layout), loaded.model


def test_results_come_in_the_order_of_plans() -> None:
    executor, hand, model = start()
    assert model.num_forwards == 4  # warm-up: a prompt, two steps after a long context, and a decode step
    hand.add(0, [5, 6, 7])
    plans = [hand.plan({0: 3}), hand.plan({0: 1}, by_row=True), hand.plan({0: 1}, by_row=True)]
    for plan in plans:
        executor.submit(plan)
    results = [executor.receive() for _ in plans]
    assert [result.step_id for result in results] == [plan.step_id for plan in plans]
    assert [result.sampled_ids[0] for result in results] == model.continue_greedily([5, 6, 7], 3)
    assert results[0].timings.forward_s > 0
    executor.shutdown()


def test_a_failing_step_drops_the_plans_behind_it() -> None:
    executor, hand, model = start()
    hand.add(0, [5, 6, 7])
    broken = hand.plan({0: 3})
    broken.input_row = [9]
    executor.submit(broken)
    hand.finish(0)
    executor.submit(hand.plan({}))
    with pytest.raises(StepFailed, match="Step 0 failed: ValueError: Batch row 0 takes its input from row 9"):
        executor.receive()
    with pytest.raises(StepFailed, match="no plan was submitted"):
        executor.receive()
    hand.add(1, [8, 9])
    executor.submit(hand.plan({1: 2}))
    assert executor.receive().sampled_ids == model.continue_greedily([8, 9], 1)


def test_max_model_len_is_bounded_by_the_model() -> None:
    executor, _, _ = start(max_model_len=50)
    assert executor.start().max_model_len == 50
    assert LocalExecutor(engine_config(), load_toy([layer()], max_position=100)).start().max_model_len == 100
    with pytest.raises(ConfigError, match="--max-model-len is 101; the model reaches 100"):
        start(max_model_len=101)


def test_a_pool_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold one block"):
        start(pool_bytes=500)


def test_a_pool_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"KV pool of \d+ bytes cannot be allocated on cpu .* smaller --kv-cache-memory"
    ):
        start(pool_bytes=1 << 50)


def test_blocks_are_read_behind_queued_plans() -> None:
    executor, hand, model = start(host_bytes=2**20)
    hand.add(0, [5, 6, 7])
    first, copy = hand.plan({0: 3}), StepPlan(step_id=1)
    copy.copy_group, copy.copy_source, copy.copy_target = [0], [first.delta_blocks[0]], [2]
    copy.copy_source_tier, copy.copy_target_tier, copy.copy_ticket = [TIER_DEVICE], [TIER_HOST], [0]
    executor.submit(first)
    executor.submit(copy)
    (spilled,) = executor.read_blocks(TIER_HOST, 0, [2])
    assert spilled == executor.read_blocks(TIER_DEVICE, 0, first.delta_blocks[:1])[0]
    assert any(spilled)
    executor.write_blocks(TIER_HOST, 0, [3], [spilled])
    assert executor.receive().sampled_ids == model.continue_greedily([5, 6, 7], 1)
    assert executor.receive().step_id == 1
    executor.shutdown()
    with pytest.raises(StepFailed, match="not running"):
        executor.read_blocks(TIER_HOST, 0, [2])


def test_a_failed_and_a_dropped_plan_make_their_copies() -> None:
    executor, hand, _ = start(host_bytes=2**20)
    block = bytes(range(128)) * (hand.layout.groups[0].block_bytes // 128)
    hand.add(0, [5, 6, 7])
    failing, dropped, load = hand.plan({0: 3}), StepPlan(step_id=1), StepPlan(step_id=2)
    failing.input_row = [9]
    for plan, source, target, ticket in [(failing, 0, 1, 0), (dropped, 1, 2, 0), (load, 2, 3, 4)]:
        plan.copy_group, plan.copy_source, plan.copy_target = [0], [source], [target]
        plan.copy_source_tier, plan.copy_target_tier, plan.copy_ticket = [TIER_HOST], [TIER_HOST], [ticket]
        if ticket:
            plan.copy_target_tier = [TIER_DEVICE]
    executor.write_blocks(TIER_HOST, 0, [0], [block])
    executor.submit(failing)
    executor.submit(dropped)
    with pytest.raises(StepFailed):
        executor.receive()
    executor.submit(load)
    executor.drop_in_flight()
    assert executor.read_blocks(TIER_HOST, 0, [2]) == [block]
    loaded: list[int] = []
    while not loaded:
        executor.submit(StepPlan(step_id=3))
        loaded = executor.receive().loaded
    assert loaded == [4]
    assert executor.read_blocks(TIER_DEVICE, 0, [3]) == [block]
    executor.shutdown()
