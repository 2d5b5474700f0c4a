"""Compiles the kernels that a model needs, for this processor or for a GPU, so that the model's first start finds them compiled."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, SamplingParams, WindowPolicy
from transom_core.errors import ConfigError
from transom_core.settings.settings import Settings
from transom_kernels.cpu.kernel import cache_directory, statistics
from transom_worker.execution.setup.model_loading import load_model
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.llm import LLM
from transom_worker.models.parallel.communicator import Parallel

# The two requests (`_SAMPLING`) end after 4 and after 6 tokens, so there are decode steps of several sequences and of one.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 40, 4
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
# 20 tokens, because `kv_quality` compares every 13th token.
_POLICY_SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Compiled:
    """How many kernels were compiled, how many seconds that took, and the directory with their code."""

    num_kernels: int
    seconds: float
    directory: Path


def precompile(model: str, **settings: Any) -> Compiled:
    """Load a model on the CPU and generate answers with it, also under KV policies if the model supports them.

    This compiles every kernel that the model needs with these settings and that is not yet in the code cache.

    Raises:
        ConfigError, ModelError: a setting or the checkpoint is wrong.
    """
    before = (statistics.num_compiled, statistics.compile_s)
    # Few sequences, so that their pool is small; states of recurrent layers may take 80 MB each.
    with LLM(model, device="cpu", max_num_seqs=len(_SAMPLING), max_model_len=256, **settings) as llm:
        prompts = [{"prompt_token_ids": [1 + i % 7 for i in range(_PROMPT_TOKENS)]} for _ in _SAMPLING]
        if llm.engine.info.num_labels:  # a classifier writes no text
            llm.generate(prompts, SamplingParams(pooling="last", max_tokens=1), use_tqdm=False)
            return _compiled_since(*before)
        llm.generate(prompts, _SAMPLING, use_tqdm=False)
        if not llm.engine.scheduler.kv_policy_obstacle:
            for policy in _POLICIES:
                llm.generate(prompts, _POLICY_SAMPLING, use_tqdm=False, kv_policy=policy, kv_quality=True)
    return _compiled_since(*before)


def _compiled_since(num_compiled: int, seconds: float) -> Compiled:
    return Compiled(statistics.num_compiled - num_compiled, statistics.compile_s - seconds, cache_directory())


_GPU_STEP_TOKENS = 8192  # the tokens of a step on the largest GPUs, so that all tile sizes occur


def precompile_for_gpu(
    model: str, *, capability: tuple[int, int], tensor_parallel_size: int = 1, **more: object
) -> Compiled:
    """Load a model into host memory, and compile the kernels that its warm-up launches on a GPU of this compute capability.

    `more` are settings of the server that decide which kernels run. The machine needs no such GPU. With several ranks only rank
    0's part is loaded, because the others launch the same kernels.

    Raises:
        ConfigError, ModelError: a setting or the checkpoint is wrong, or there are no kernels for `capability`.
    """
    from transom_kernels.absent_device import absent_gpu, compiled_directory, no_work

    settings = {
        **{"model": model, "device": "cpu", "tensor_parallel_size": tensor_parallel_size, "enforce_eager": True},
        **{"max_num_seqs": 1, "max_num_batched_tokens": _GPU_STEP_TOKENS, **more},
    }
    config = Settings.parse(**settings).engine_config()
    parallel = Parallel(size=tensor_parallel_size)
    num_compiled, begin_s = 0, time.perf_counter()

    def count(*, cache_hit: bool, **_: object) -> None:
        nonlocal num_compiled
        num_compiled += not cache_hit

    with ExitStack() as gpu:
        try:
            gpu.enter_context(absent_gpu(capability, count))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        loaded = load_model(config.model, parallel, ranks_on_host=tensor_parallel_size, lora=config.lora)
        max_model_len = min(_GPU_STEP_TOKENS, loaded.architecture.max_position)
        config = Settings.parse(**settings, max_model_len=max_model_len).engine_config()
        setup = ModelSetup(config, parallel, loaded)
        with no_work():
            setup.allocate(setup.pool_bytes())
    return Compiled(num_compiled, time.perf_counter() - begin_s, compiled_directory())
