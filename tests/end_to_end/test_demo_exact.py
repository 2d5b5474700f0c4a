"""The demo model in fp32 against transformers on the same weights: 32 prompts, whatever else goes on."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_checkpoints import FULL, HybridCase, reference_steps
from transom_worker import LLM, SamplingParams
from transom_worker.llm import RequestOutput
from transom_worker.model_files import resolve_model
from transom_worker.tokenizer import Tokenizer
from transom_worker.weights import load_weights

pytestmark = pytest.mark.timeout(900)  # a real model computes for minutes where others compute beside it

NUM_TOKENS = 12
NEAR_TIE = 1e-4  # design section 5: a divergence is excused only below this margin
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 100, 127, 128)
LENGTHS += (129, 200, 256, 257, 400, 513, 800, 1500)


@dataclass(frozen=True)
class Expected:
    """transformers' greedy continuation and its margins (top-1 minus top-2 logit) at each step."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    """transformers' model with the demo's weights (which a test of `weights` compares with transformers' own loader)."""
    files = resolve_model("smollm2")
    weights = load_weights(files)
    config = LlamaConfig(**{k: v for k, v in files.config.items() if k != "model_type"}, attn_implementation="sdpa")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: weights(name).float() for name in weights.names}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.to_empty(device="cpu")
    model.load_state_dict(state, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 prompts of 1 to 1,500 tokens, no two with a common beginning."""
    text = Tokenizer.load(resolve_model("smollm2")).encode(inspect.getsource(argparse))
    assert len(LENGTHS) == 32
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [text[a : a + n] for a, n in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def expected(oracle: LlamaForCausalLM, prompts: list[list[int]]) -> list[Expected]:
    return [continuation(oracle, prompt) for prompt in prompts]


def continuation(model: LlamaForCausalLM, prompt: list[int], case: HybridCase = FULL) -> Expected:
    steps = reference_steps(model, prompt, NUM_TOKENS, case)
    return Expected(prompt, [token for token, _ in steps], [margin for _, margin in steps])


def make(**settings: object) -> LLM:
    return LLM("smollm2", dtype="float32", **{"max_num_seqs": 32, "kv_cache_memory_bytes": "1GiB", **settings})


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def check(outputs: list[RequestOutput], expected: list[Expected]) -> None:
    excused = 0
    for out, want in zip(outputs, expected, strict=True):
        got = out.outputs[0].token_ids
        assert len(got) == NUM_TOKENS
        if got != want.tokens:
            at = next(i for i, (a, b) in enumerate(zip(got, want.tokens, strict=True)) if a != b)
            assert want.margins[at] < NEAR_TIE, (len(want.prompt), at, want.margins[at])
            excused += 1
    assert excused <= 1


def test_alone_then_all_at_once_from_the_cache(expected: list[Expected]) -> None:
    with make() as llm:
        alone = [generate(llm, [want.prompt])[0] for want in expected]
        check(alone, expected)
        assert {out.num_cached_tokens for out in alone} == {0}
        again = generate(llm, [want.prompt for want in expected])
        check(again, expected)
        for out, want in zip(again, expected, strict=True):
            assert out.num_cached_tokens == (len(want.prompt) - 1) // 16 * 16


def test_all_at_once_in_chunks(expected: list[Expected]) -> None:
    with make(max_num_batched_tokens=96, enable_prefix_caching=False) as llm:
        check(generate(llm, [want.prompt for want in expected]), expected)


def test_a_pool_so_small_that_requests_queue_and_are_preempted(expected: list[Expected]) -> None:
    block_bytes = 30 * 2 * 3 * 64 * 4 * 16
    with make(kv_cache_memory_bytes=100 * block_bytes, max_num_batched_tokens=512) as llm:
        check(generate(llm, [want.prompt for want in expected]), expected)
        assert llm.engine.num_preemptions > 0


@pytest.mark.parametrize("sinks", [0, 4])
def test_windows_on_real_weights_are_a_hybrid(oracle: LlamaForCausalLM, prompts: list[list[int]], sinks: int) -> None:
    """SSF with a window of 40 equals transformers with the same masks: cold, from the cache, with the hybrid cache off."""
    case = HybridCase(window=40, sinks=sinks, pattern="SSF")
    some = prompts[2:-1:2]
    expected = [continuation(oracle, prompt, case) for prompt in some]
    with make(**case.settings()) as llm:
        assert len(llm.engine.info.layout.groups) == 2
        check(generate(llm, some), expected)
        again = generate(llm, some)
        check(again, expected)
        assert sum(out.num_cached_tokens for out in again) > 0
    with make(**case.settings(), hybrid_kv_cache=False, max_num_batched_tokens=200) as llm:
        assert len(llm.engine.info.layout.groups) == 1
        check(generate(llm, some), expected)
