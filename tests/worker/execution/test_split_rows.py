"""Short rows are split into rows of one token, and steps with prompts of a few tokens are replayed."""

from pathlib import Path

import pytest

from tests.checkpoints import prompt
from tests.engine_driver import make_request, run
from tests.oracle_answers import oracle_answers
from tests.thread_ranks import make_sharded_engine
from tests.tiny_checkpoints import HybridCase
from transom_kernels.launch import has_cpu_kernels
from transom_worker.execution.batch.split_rows import MOST_KEYS, MOST_TOKENS, split_rows
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
    for row in ((0, MOST_TOKENS + 1, 0, 0), (MOST_KEYS // 2, 2, 0, 0)):
        plan = plan_of(row)
        assert split_rows(plan) is plan


@pytest.mark.skipif(not has_cpu_kernels(), reason="this processor has no kernels")
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
