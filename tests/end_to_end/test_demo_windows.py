"""The demo model with windows put on it, in fp32, against transformers with the same masks."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from tests.end_to_end.demo_model import check, continuations, demo_prompts, generate, load_oracle, make
from tests.how_many import ALL_TESTS
from tests.tiny_checkpoints import HybridCase

# a real model computes for minutes where others compute beside it
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("two_threads")]


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load_oracle()


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
