"""Transom, from the source tree or environment that runs the benchmark.

Run as a program, this module is the child that holds one engine. The prompts of one context length are the same every time, and the
prompts of a smaller batch are the first of a larger one. So only the first time computes them: later ones find them in the prefix
cache and begin to decode at once.
"""

import os
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.engine.peers.engine import Engine, clean_environment, random_prompt
from benchmarks.engine.steps import Steps
from benchmarks.json_child import answer_calls, commit
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine

KV_CACHE_MEMORY = "2GiB"  # as vLLM gets
INHERITED = ("PYTHONPATH", "TRANSOM_KERNELS")


def transom(name: str, model: str, num_threads: int, variables: Mapping[str, str]) -> Engine:
    """Transom over a folder of bfloat16 safetensors, with some environment variables."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return Engine(
        name=name,
        python=sys.executable,
        module=__name__,
        settings=dict(
            model=model, dtype="bfloat16", device="cpu", kv_cache_memory_bytes=KV_CACHE_MEMORY, num_threads=num_threads
        ),
        environment=clean_environment(**{**kept, **variables}),
    )


class TransomChild:
    """One engine and the sequences that it decodes now."""

    _steps: Steps

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine."""
        self._steps = Steps(build_engine(Settings.parse(**settings).engine_config()))
        return {"version": commit()}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds from the admission of one new prompt to its first token."""
        self._steps.stop()
        begin_s = time.perf_counter()
        self._steps.add(random_prompt(random.Random(), num_tokens))
        self._steps.until_started()
        return {"seconds": time.perf_counter() - begin_s}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of `batch` sequences whose first token stands at position `context`."""
        self._steps.stop()
        for index in range(batch):
            self._steps.add(random_prompt(random.Random(f"{context} {index}"), context), salt="start")
        self._steps.until_started()
        begin_s = time.perf_counter()
        num_tokens = self._steps.tokens(steps)
        seconds = time.perf_counter() - begin_s
        if num_tokens != steps * batch:
            raise RuntimeError(
                f"{steps} steps of {batch} sequences gave {num_tokens} tokens; the KV pool is too small."
            )
        return {"seconds": seconds}


if __name__ == "__main__":
    answer_calls(TransomChild())
