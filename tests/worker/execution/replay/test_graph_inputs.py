"""A step writes its own numbers into the buffers of its size, and padding that reads nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from tests.worker.execution.toy_decoder import layer, load_toy
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.launches import LaunchKey, launches_of
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.backends import GRAPH_BYTES, graph_bytes
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_inputs import GraphInputs, buffer_bytes, plan_work_by_key, size_of
from transom_worker.execution.runner import ModelRunner

CONFIG = engine_config(pool_bytes=2**20)
ASKS = tuple(
    (group, LaunchKey(rule=MaskRule(window=window), group=1, key_size=8, element_bytes=4, cache_bytes=4))
    for group, window in ((0, None), (1, 6))
)


def make() -> tuple[ModelRunner, DecodeSizes]:
    runner = make_runner(CONFIG, load_toy([layer(), layer(window=6)], max_position=4000))
    specs = [group.spec for group in runner.info.layout.groups]
    return runner, DecodeSizes(specs, max_num_seqs=8, max_model_len=4000, max_num_batched_tokens=64)


def decoding(runner: ModelRunner, lengths: list[int]) -> StepArrays:
    """Return a decode step of sequences with these numbers of computed tokens."""
    hand = HandScheduler(runner.info.layout)
    for seq_id, length in enumerate(lengths):
        hand.add(seq_id, [7] * length)
        runner._apply(hand.plan({seq_id: length}))
        hand.sequences[seq_id].next_id = 40 + seq_id
    plan = hand.plan(dict.fromkeys(range(len(lengths)), 1))
    runner._apply(plan)
    return runner._builder.arrays(plan, runner._store)


def test_a_step_in_a_larger_size() -> None:
    runner, sizes = make()
    builder, size = runner._builder, DecodeSize(level=1, num_seqs=4)
    host, device = (torch.full((buffer_bytes(size, sizes, ASKS, builder),), 77, dtype=torch.uint8) for _ in range(2))
    batch = GraphInputs(size, sizes, ASKS, builder, host=host, device=device)
    for lengths in ([1500, 3, 40, 9], [5, 1100, 11]):  # what the first leaves does not matter
        arrays = decoding(runner, lengths)
        works = plan_work_by_key(arrays, ASKS)
        assert sizes.smallest_for(size_of(arrays, works)) == size
        batch.write(arrays, works)
        device.copy_(host)
    got, wanted = batch.forward_batch(), builder.batch(arrays)
    assert got.token_ids.tolist() == [40, 41, 42, 0]
    assert got.positions.tolist() == [5, 1100, 11, 0]
    assert got.logit_rows.tolist() == [0, 1, 2, 3]
    for index, asked in ASKS:
        mine, plain = got.groups[index], wanted.groups[index]
        dump = runner.info.layout.dump_block(index) * mine.block_size
        assert mine.slots.tolist() == [*plain.slots.tolist(), dump]
        assert torch.equal(mine.block_table[:3, : plain.block_table.shape[1]], plain.block_table)
        assert mine.first_block.tolist() == [*plain.first_block.tolist(), 0]
        assert mine.query_offset.tolist() == [0, 1, 2, 3, 4]
        assert (mine.count_host, mine.start_host, mine.block_table_host) == ([], [], [])
        work, own = launches_of(mine, asked, device.device)[0].work, launches_of(plain, asked, device.device)[0].work
        num, combine_items = len(own.items), len(own.combine_items)
        assert torch.equal(work.items[:num], own.items)
        assert torch.equal(work.combine_items[:combine_items], own.combine_items)
        # Row 3 of sequence 3 is a token that sees no key.
        assert work.items[num].tolist() == [3, 1, -1, 3, *[0] * 4, -1]
        assert work.items[num + 1 :].tolist() == [[0] * (ITEM_FIELDS - 1) + [-1]] * (sizes.num_items(size) - num - 1)
        assert not work.combine_items[combine_items:].any()
        assert work.num_partials == sizes.num_items(size) >= own.num_partials
    assert got.groups[0].scratch is not batch.forward_batch().groups[0].scratch


def test_steps_with_prompts_are_none() -> None:
    runner, _ = make()
    hand = HandScheduler(runner.info.layout)
    hand.add(0, [3, 4, 5])
    hand.add(1, [6])
    for counts, only in (({0: 2, 1: 1}, False), ({0: 1, 1: 1}, False), ({0: 1}, True)):
        hand.sequences[1].next_id = 9
        plan = hand.plan(counts)
        if counts == {0: 1, 1: 1}:
            plan.logits_from[0] += 1  # as if more of its prompt were to come
        runner._apply(plan)
        assert runner._builder.arrays(plan, runner._store).only_decodes is only
        hand.sequences[0].next_id = 9


def test_memory_is_set_aside_for_what_graphs_hold() -> None:
    runner, sizes = make()
    architecture, scheduler = runner._architecture, CONFIG.scheduler
    assert graph_bytes(None, architecture, scheduler, "float32") == 0
    held = graph_bytes(sizes, architecture, scheduler, "float32")
    top = DecodeSize(level=sizes.num_levels - 1, num_seqs=8)
    partials = sizes.num_items(top) * 2 * 16 * 10 * 4  # KV heads, rows, values with a maximum and a sum
    specs = [group.spec for group in runner.info.layout.groups]
    mixed = DecodeSizes(specs, max_num_seqs=8, max_model_len=4000, max_num_batched_tokens=512)
    added = graph_bytes(mixed, architecture, scheduler, "float32") - held
    largest = replace(scheduler, max_num_batched_tokens=512, max_num_seqs=8)
    assert added >= len(mixed.mixed) * GRAPH_BYTES + activation_bytes(architecture, largest, torch.float32) + partials
    assert held > len(sizes.all) * GRAPH_BYTES + partials + buffer_bytes(top, sizes, ASKS, runner._builder) // 2
