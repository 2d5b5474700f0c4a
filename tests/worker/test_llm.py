"""Offline use, with the interface that vLLM's users know."""

import _thread
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folders import adapt_checkpoint
from tests.hooked_executor import HookedExecutor
from transom_core.errors import ConfigError, EngineDead, RequestError
from transom_worker import LLM, LoRARequest, SamplingParams
from transom_worker.engine import startup


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), dtype="float32", kv_cache_memory_bytes="8MiB", num_threads=1, seed=3) as llm:
        yield llm


def test_one_prompt_or_many_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in ("one", "two words", "three")]
    together = llm.generate(["one", "two words", {"prompt_token_ids": alone[2].prompt_token_ids}], params)
    assert [out.outputs[0].token_ids for out in together] == [out.outputs[0].token_ids for out in alone]
    assert [out.prompt for out in together] == ["one", "two words", None]
    assert all(out.outputs[0].finish_reason == "length" for out in together)
    tokenizer = llm.get_tokenizer()
    assert all(out.outputs[0].text == tokenizer.decode(out.outputs[0].token_ids) for out in together)


def test_choices_seeds_and_parameters_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True), SamplingParams(max_tokens=2, ignore_eos=True)]
    first, second = llm.generate(["abc", "abc"], params, use_tqdm=False)
    again, _ = llm.generate(["abc", "abc"], params, use_tqdm=False)
    texts = [choice.token_ids for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in again.outputs] == texts
    assert len({tuple(ids) for ids in texts}) == 3
    assert len(second.outputs[0].token_ids) == 2


def test_logprobs_by_step_and_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (out,) = llm.generate({"prompt_token_ids": [9, 8, 7]}, params, use_tqdm=False)
    choice = out.outputs[0]
    assert choice.logprobs is not None
    for token_id, step in zip(choice.token_ids, choice.logprobs, strict=True):
        assert step[token_id].rank == 1
        assert step[token_id].logprob == max(entry.logprob for entry in step.values())
        assert len(step) == 2
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert all(token in step for token, step in zip([8, 7], out.prompt_logprobs[1:], strict=True) if step)


def test_chat_uses_the_template(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    two = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert one.prompt is not None
    assert "<|im_start|>user\nHi" in one.prompt
    assert [out.outputs[0].token_ids for out in two] == [one.outputs[0].token_ids] * 2


def test_wrong_arguments_are_refused(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [SamplingParams(), SamplingParams()])
    for wrong, message in (
        ({"prompts": {"prompt_token_ids": ["a"]}}, "give a list of numbers"),
        ({"prompts": {"prompt_token_ids": None}}, "give a list of numbers"),
        ({"sampling_params": {"max_tokens": 3}}, "give a SamplingParams"),
        ({"lora_request": "x"}, "give LoRARequest objects"),
        ({"kv_policy": "window"}, "give 'default', 'full' or a policy"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(**({"prompts": "a"} | wrong))
    with pytest.raises(RequestError, match=r"give a list of \{'role', 'content'\}"):
        llm.chat(["hi"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": "a"})
    with pytest.raises(RequestError, match=r"A prompt is 5; .*prompt_token_ids"):
        llm.generate([5, 6])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="max_seqs is not a setting"):
        LLM(str(tiny_model), max_seqs=3)
    assert llm.generate("still there", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


def test_outputs_follow_a_grammar(llm: LLM) -> None:
    grammar = 'start: %json {"type": "array", "items": {"enum": ["red", 7]}, "minItems": 2, "maxItems": 2}'
    params = SamplingParams(n=3, temperature=1.5, max_tokens=200, seed=4)
    for out in llm.generate(["a", "b"], params, grammar=grammar, use_tqdm=False):
        for choice in out.outputs:
            if choice.finish_reason == "stop":
                assert {*json.loads(choice.text)} <= {"red", 7}
    with pytest.raises(RequestError, match="unknown name"):
        llm.generate("a", params, grammar="start: nothing", use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids


def test_each_prompt_may_have_an_adapter(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    adapter, merged = adapt_checkpoint(tiny_model, tmp_path)
    lora, params = LoRARequest("a", 1, adapter.path), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "8MiB", "num_threads": 1}
    with LLM(str(tiny_model), enable_lora=True, **settings) as adapted, LLM(str(merged), **settings) as oracle:
        mixed = adapted.generate(["one", "one"], params, lora_request=[lora, None], use_tqdm=False)
        expected = [oracle.generate("one", params, use_tqdm=False), llm.generate("one", params, use_tqdm=False)]
        assert [out.outputs[0].text for out in mixed] == [out[0].outputs[0].text for out in expected]
        with pytest.raises(RequestError, match="1 lora_requests for 2 prompts"):
            adapted.generate(["one", "two"], params, lora_request=[lora])
    with pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate("one", params, lora_request=lora)


def test_a_small_queue_keeps_the_batch_full(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(str(tiny_model), kv_cache_memory_bytes="8MiB", num_threads=1, max_num_seqs=4, max_waiting=0) as llm:
        assert all(out.outputs[0].finish_reason == "length" for out in llm.generate(["a"] * 9, params, use_tqdm=False))
        steps = {
            sample.labels["le"]: sample.value
            for family in llm.engine.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "transom_step_sequences_bucket"
        }
        assert steps["2.0"] < steps["4.0"] == steps["+Inf"]  # 4 sequences in a step at most


def test_a_step_that_hangs_becomes_an_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it hangs in native code, which no exception reaches."""
    monkeypatch.setattr(startup, "create_executor", HookedExecutor)
    release = threading.Event()
    with LLM(str(tiny_model), kv_cache_memory_bytes="8MiB", num_threads=1, step_timeout_s=1.0) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, HookedExecutor)
        assert llm.generate("before", SamplingParams(max_tokens=1), use_tqdm=False)
        executor.before_step = lambda: release.wait(120)
        for _ in range(2):
            with pytest.raises(EngineDead, match=r"hangs: a step has taken longer than 1 s \(--step-timeout-s\)"):
                llm.generate("hangs", use_tqdm=False)
    release.set()


def test_an_interrupt_waits_for_the_step_and_leaves_the_engine_usable(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "create_executor", HookedExecutor)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(tiny_model), kv_cache_memory_bytes="8MiB", num_threads=1) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, HookedExecutor)
        (expected,) = llm.generate("again", params, use_tqdm=False)

        def interrupt() -> None:
            executor.before_step = lambda: None
            _thread.interrupt_main()

        executor.before_step = interrupt
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # test processes side by side ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["one", "two"], SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert not llm.engine.requests
        (found,) = llm.generate("again", params, use_tqdm=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
