"""The demo model in fp32 against transformers on the same weights: in chunks, cached, and with windows put on it.

`make test-all` asks 32 prompts for 12 tokens each, the daily tests a few for fewer: below, at and above the edges of a block of 16
tokens, of a window of 40 and of a chunk of 96.
"""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cluster.engine_server import engine_server
from tests.how_many import ALL_TESTS
from tests.tiny_checkpoints import FULL, HybridCase, reference_steps
from transom_core.model_files.resolve import resolve_model
from transom_core.text.tokenizer import Tokenizer
from transom_worker import LLM, SamplingParams
from transom_worker.llm import RequestOutput
from transom_worker.models.weights.load import load_weights

# a real model computes for minutes where others compute beside it
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("two_threads")]

# Each token of a request that has its steps alone is a pass over all weights; a few still cross the block edges.
NUM_ALONE = 6 if ALL_TESTS else 2
NUM_TOKENS = 12 if ALL_TESTS else 4
NEAR_TIE = 1e-4  # design section 5: a divergence is excused only below this margin
DAILY_LENGTHS = (15, 16, 17, 39, 41, 95, 97)
SHORT_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 100, 127, 128)
ALL_LENGTHS = (*SHORT_LENGTHS, 129, 200, 256, 257, 400, 513, 800, 1500)
LENGTHS = ALL_LENGTHS if ALL_TESTS else DAILY_LENGTHS


@dataclass(frozen=True)
class Expected:
    """transformers' greedy continuation and its margins (top-1 minus top-2 logit) at each step."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


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


def demo_prompts() -> list[list[int]]:
    """A prompt of each length, no two with a common beginning."""
    text = Tokenizer.load(resolve_model("smollm2")).encode(inspect.getsource(argparse))
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [text[a : a + n] for a, n in zip(starts, LENGTHS, strict=True)]


def continuations(
    model: LlamaForCausalLM, prompts: list[list[int]], guesses: list[RequestOutput], case: HybridCase = FULL
) -> list[Expected]:
    """What transformers continues each prompt with; the guesses make it faster where they are right."""
    found = []
    for prompt, guess in zip(prompts, guesses, strict=True):
        steps = reference_steps(model, prompt, NUM_TOKENS, case, guess=guess.outputs[0].token_ids)
        found.append(Expected(prompt, [token for token, _ in steps], [margin for _, margin in steps]))
    return found


def make(**settings: object) -> LLM:
    room = {"max_num_seqs": 32, "kv_cache_memory_bytes": "512MiB" if ALL_TESTS else "64MiB"}
    return LLM("smollm2", dtype="float32", **{**room, **settings})


def generate(llm: LLM, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def check(outputs: list[RequestOutput], expected: Sequence[Expected], num_tokens: int = NUM_TOKENS) -> None:
    """Every answer is what was expected; one of them may go its own way from a near tie."""
    excused = 0
    for out, want in zip(outputs, expected, strict=True):
        got, tokens = out.outputs[0].token_ids, want.tokens[:num_tokens]
        assert len(got) == num_tokens
        if got != tokens:
            at = next(i for i, (a, b) in enumerate(zip(got, tokens, strict=True)) if a != b)
            assert want.margins[at] < NEAR_TIE, (len(want.prompt), at, want.margins[at])
            excused += 1
    assert excused <= 1


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Of torch, for a real model; other tests have `cpu_threads.NUM_THREADS`."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def in_chunks() -> list[RequestOutput]:
    """All at once, in chunks, without a prefix cache."""
    with make(max_num_batched_tokens=96, enable_prefix_caching=False) as llm:
        return generate(llm, demo_prompts())


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


@pytest.mark.parametrize("sinks", [pytest.param(0, marks=pytest.mark.exhaustive), 4])
def test_windows_on_real_weights_are_a_hybrid(oracle: LlamaForCausalLM, sinks: int) -> None:
    """SSF with a window of 40 equals transformers with the same masks: cold and from the cache."""
    case = HybridCase(window=40, sinks=sinks, pattern="SSF")
    some = demo_prompts()[2:-1:2] if ALL_TESTS else demo_prompts()[3::2]
    with make(**case.settings()) as llm:
        assert len(llm.engine.info.layout.groups) == 2
        cold = generate(llm, some)
        expected = continuations(oracle, some, cold, case)
        check(cold, expected)
        again = generate(llm, some)
        check(again, expected)
        assert sum(out.num_cached_tokens for out in again) > 0


NUM_ITEMS = 50 if ALL_TESTS else 12  # of lm-eval's test
CONTEXT, CONTINUATION = 9, 4  # tokens of an item, and of each of its two continuations


@torch.inference_mode()
def test_lm_eval_gets_the_log_likelihoods_of_its_hf_model(oracle: LlamaForCausalLM) -> None:
    """The requests are those of lm-eval's `local-completions`, which reads its figures from the echoed prompt's tokens."""
    text = Tokenizer.load(resolve_model("smollm2")).encode(inspect.getsource(argparse))
    items = [text[31 * i : 31 * i + CONTEXT + CONTINUATION] for i in range(NUM_ITEMS)]
    prompts = [
        item[:CONTEXT] + ends for i, item in enumerate(items) for ends in (item[CONTEXT:], items[i - 7][:CONTINUATION])
    ]
    logprobs = torch.log_softmax(oracle(torch.tensor(prompts)).logits[:, CONTEXT - 1 : -1], dim=-1)
    chosen = torch.tensor(prompts)[:, CONTEXT:]
    expected = logprobs.gather(2, chosen[..., None])[..., 0].sum(dim=1)
    is_greedy = (logprobs.argmax(dim=-1) == chosen).all(dim=1)
    body = {"model": "tiny", "prompt": prompts, "seed": 1234}
    body |= {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    with engine_server("smollm2", dtype="float32", kv_cache_memory_bytes="64MiB", max_num_seqs=8) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    found = [choice["logprobs"] for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]
    sums = [sum(one["token_logprobs"][CONTEXT:-1]) for one in found]
    assert sums == pytest.approx(expected.tolist(), abs=1e-3)
    for one, greedy in zip(found, is_greedy.tolist(), strict=True):
        pairs = zip(one["token_logprobs"][CONTEXT:-1], one["top_logprobs"][CONTEXT:-1], strict=True)
        assert all(logprob == max(top.values()) for logprob, top in pairs) == greedy
    assert 0 < sum(is_greedy.tolist()) < NUM_ITEMS
