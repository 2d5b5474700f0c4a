"""Short rows are split into rows of one token, and steps with prompts of a few tokens are replayed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.oracle_answers import oracle_answers
from tests.thread_ranks import make_sharded_engine
from tests.tiny_checkpoints import HybridCase
from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from transom_core.contract import WindowPolicy
from transom_kernels.launch import has_cpu_kernels
from transom_kernels.paged_attention.cpu.layout import SHORT_KEYS, SHORT_ROWS
from transom_worker.execution.batch.split_rows import split_rows
from transom_worker.execution.step_sampling import StepLogits, sample_step
from transom_worker.scheduling.step import StepPlan

HYBRID = HybridCase(window=17, sinks=5, pattern="SSF")


def plan_of(*rows: tuple[int, int, int, int]) -> StepPlan:
    """A plan of rows (start, count, logits from, write from)."""
    start, count, logits_from, write_from = map(list, zip(*rows, strict=True))
    return StepPlan(
        step_id=0,
        seq_ids=[*range(len(rows))],
        start=start,
        count=count,
        logits_from=logits_from,
        write_from=[write_from],
        attend_from=[[row // 2 for row in start]],
    )


def test_tokens_and_logits_keep_their_order() -> None:
    split = split_rows(plan_of((40, 1, 40, 40), (16, 3, 18, 17), (0, 25, 25, 0), (7, 2, 7, 7)))
    assert split.seq_ids == [0, 1, 1, 1, 2, 3, 3]
    assert split.start == [40, 16, 17, 18, 0, 7, 8]
    assert split.count == [1, 1, 1, 1, 25, 1, 1]
    assert split.logits_from == [40, 17, 18, 18, 25, 7, 8]  # of row 1 the last token's, of row 3 both
    assert split.write_from == [[40, 17, 17, 17, 0, 7, 7]]
    assert split.attend_from == [[20, 8, 8, 8, 0, 3, 3]]


def test_long_rows_are_not_split() -> None:
    for row in ((0, SHORT_ROWS + 1, 0, 0), (SHORT_KEYS // 2, 2, 0, 0)):
        plan = plan_of(row)
        assert split_rows(plan) is plan


needs_kernels = pytest.mark.skipif(not has_cpu_kernels(), reason="this processor has no kernels")


@needs_kernels
def test_what_a_cached_prefix_leaves_is_replayed(tiny_model: Path) -> None:
    """Alone and beside decoding sequences; the first two steps of each number of rows record and check."""
    settings = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 4, "hybrid_kv_cache": True, **HYBRID.settings()}
    engine, ranks = make_sharded_engine(str(tiny_model), 1, **settings)
    prompts = [prompt(length) for length in (60, 61, 85, 34)]
    want = oracle_answers(tiny_model, prompts, 12, HYBRID)
    for turn in range(4):
        forward = ranks.runners[0]._forward
        before = forward.num_eager_steps
        answers = run(engine, [make_request(f"{turn} {i}", ids, max_tokens=12) for i, ids in enumerate(prompts)])
        assert [answer.token_ids for answer in answers] == want
        assert (forward.num_eager_steps > before) == (turn == 0)
    engine.shutdown()


@needs_kernels
def test_a_model_that_cannot_be_recorded_answers_a_short_first_prompt(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    engine = make_engine(str(tmp_path), dtype="bfloat16", quantization="int8", max_model_len=64)
    first, again = (run(engine, [make_request(name, prompt(5), max_tokens=4)])[0] for name in ("first", "again"))
    assert first.token_ids == again.token_ids
    assert len(first.token_ids) == 4
    engine.shutdown()


@needs_kernels
@pytest.mark.parametrize("num_tokens", [6, 12, 16, 20])
def test_a_neighbour_with_a_kv_policy_changes_no_bit(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Such a step is not split."""
    found: list[torch.Tensor] = []

    def noted(plan: StepPlan, logits: StepLogits, *arguments: Any, **more: Any) -> Any:
        found.append(logits.sampled_SV.clone())
        return sample_step(plan, logits, *arguments, **more)

    monkeypatch.setattr("transom_worker.execution.runner.sample_step", noted)
    config = engine_config(tiny_model, dtype="bfloat16")
    config = replace(config, cache=replace(config.cache, kv_cache_dtype="int8"))
    for policy in (None, WindowPolicy(sinks=4, window=1000)):
        runner = make_runner(config)
        steps = HandScheduler(runner.info.layout)
        steps.add(0, prompt(40 + num_tokens))
        steps.add(1, prompt(20), kv_policy=policy)
        for counts in ({0: 40}, {1: 19}, {0: num_tokens, 1: 1}):
            plan = steps.plan(counts)
            if policy is not None and 1 in counts:
                plan.row_window, plan.row_sinks = ([value * one for one in plan.seq_ids] for value in (1000, 4))
                plan.wants_mass = plan.measure = [0] * len(plan.seq_ids)
            runner.execute(plan)
    assert torch.equal(found[2][0], found[-1][0])
