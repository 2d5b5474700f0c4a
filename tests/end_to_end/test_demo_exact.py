"""The demo model in fp32 against transformers on the same weights: in chunks, cached, preempted, and with windows put on it."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from tests.end_to_end.demo_model import Expected, check, continuations, demo_prompts, generate, load_oracle, make
from tests.how_many import ALL_TESTS
from tests.tiny_checkpoints import HybridCase
from transom_worker.llm import RequestOutput

# a real model computes for minutes where others compute beside it
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("two_threads")]

# Each token of a request that has its steps alone is a pass over all weights; a few still cross the block edges.
NUM_ALONE = 6 if ALL_TESTS else 2


@pytest.fixture(scope="module")
def in_chunks() -> list[RequestOutput]:
    """All at once, in chunks, without a prefix cache."""
    with make(max_num_batched_tokens=96, enable_prefix_caching=False) as llm:
        return generate(llm, demo_prompts())


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load_oracle()


@pytest.fixture(scope="module")
def expected(oracle: LlamaForCausalLM, in_chunks: list[RequestOutput]) -> list[Expected]:
    return continuations(oracle, demo_prompts(), in_chunks)


def test_all_at_once_in_chunks(in_chunks: list[RequestOutput], expected: list[Expected]) -> None:
    check(in_chunks, expected)


def test_alone_then_all_at_once_from_the_cache(expected: list[Expected]) -> None:
    with make() as llm:
        alone = [generate(llm, [want.prompt], NUM_ALONE)[0] for want in expected]
        check(alone, expected, NUM_ALONE)
        assert {out.num_cached_tokens for out in alone} == {0}
        again = generate(llm, [want.prompt for want in expected])
        check(again, expected)
        for out, want in zip(again, expected, strict=True):
            assert out.num_cached_tokens == (len(want.prompt) - 1) // 16 * 16


def test_a_pool_so_small_that_requests_queue_and_are_preempted(expected: list[Expected]) -> None:
    """The longest of these just fits, and takes some steps to be read."""
    block_bytes = 30 * 2 * 3 * 64 * 4 * 16
    some = [want for want in expected if len(want.prompt) <= 513]
    num_blocks = 36 if ALL_TESTS else 14
    with make(kv_cache_memory_bytes=num_blocks * block_bytes, max_num_batched_tokens=192) as llm:
        check(generate(llm, [want.prompt for want in some]), some)
        assert llm.engine.scheduler.work.num_preemptions > 0


@pytest.mark.parametrize("sinks", [pytest.param(0, marks=pytest.mark.exhaustive), 4])
def test_windows_on_real_weights_are_a_hybrid(oracle: LlamaForCausalLM, sinks: int) -> None:
    """SSF with a window of 40 equals transformers with the same masks: cold, from the cache, with the hybrid cache off."""
    case = HybridCase(window=40, sinks=sinks, pattern="SSF")
    some = demo_prompts()[2:-1:2] if ALL_TESTS else demo_prompts()[4::2]
    with make(**case.settings()) as llm:
        assert len(llm.engine.info.layout.groups) == 2
        cold = generate(llm, some)
        expected = continuations(oracle, some, cold, case)
        check(cold, expected)
        again = generate(llm, some)
        check(again, expected)
        assert sum(out.num_cached_tokens for out in again) > 0
    with make(**case.settings(), hybrid_kv_cache=False, max_num_batched_tokens=200) as llm:
        assert len(llm.engine.info.layout.groups) == 1
        check(generate(llm, some), expected)
