"""Compiles the CPU kernels that a model needs, so that its first start does not have to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, SamplingParams, WindowPolicy
from transom_kernels.cpu.code_cache import cache_directory
from transom_kernels.cpu.kernel import statistics
from transom_worker.llm import LLM

_PROMPT_TOKENS, _OUTPUT_TOKENS = 40, 4  # a prompt and decode steps of one and of several sequences
_SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=2,
        max_tokens=_OUTPUT_TOKENS + 2,
        ignore_eos=True,
        seed=0,
    ),
)

_POLICIES: tuple[KvPolicy, ...] = (
    WindowPolicy(window=16),
    AdaptivePolicy(min_window=16, max_window=32, threshold=0.01),
    HeavyPolicy(budget=64),
)
_POLICY_SAMPLING = SamplingParams(
    temperature=0.0, max_tokens=20, ignore_eos=True
)  # `kv_quality` looks at every 13th token


@dataclass(frozen=True, slots=True)
class Compiled:
    """How many kernels were compiled, the seconds that this took, and the directory of their code."""

    num_kernels: int
    seconds: float
    directory: Path


def precompile(
    model: str, *, dtype: str = "auto", quantization: str = "none", kv_cache_dtype: str = "auto"
) -> Compiled:
    """Load a model on the CPU and let it answer, under KV policies as well if it can. Then every kernel that is not in the cache
    yet is compiled.

    Raises:
        ConfigError, ModelError: settings or checkpoint are wrong.
    """
    before = (statistics.num_compiled, statistics.compile_s)
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device="cpu",
        kv_cache_memory_bytes="64MiB",
        max_model_len=256,
    ) as llm:
        prompts = [{"prompt_token_ids": [1 + i % 7 for i in range(_PROMPT_TOKENS)]} for _ in _SAMPLING]
        llm.generate(prompts, _SAMPLING, use_tqdm=False)
        if not llm.engine.scheduler.kv_policy_obstacle:
            for policy in _POLICIES:
                llm.generate(prompts, _POLICY_SAMPLING, use_tqdm=False, kv_policy=policy, kv_quality=True)
    return Compiled(statistics.num_compiled - before[0], statistics.compile_s - before[1], cache_directory())
