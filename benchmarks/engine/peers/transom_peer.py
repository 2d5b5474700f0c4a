"""Transom, from the source tree or environment that runs the benchmark.

Run as a program, this module is the child that holds one engine. The prompts of one context length are the same every time, and the
prompts of a smaller batch are the first of a larger one. So only their first start computes them: later starts find them in the
prefix cache and begin to decode at once.
"""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.engine.peers.engine import ChildRun, Engine, clean_environment, random_prompt
from benchmarks.engine.steps import Steps
from benchmarks.json_child import ROOT, Child, answer_calls
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine

KV_CACHE_MEMORY = "2GiB"  # as vLLM gets


@dataclass(frozen=True, kw_only=True)
class Transom(Engine):
    """Transom."""

    name: ClassVar[str] = "transom"

    def missing(self) -> str:
        """See `Engine`. The benchmark itself runs in Transom's environment."""
        return ""

    def version(self) -> str:
        """See `Engine`."""
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        return f"commit {found.stdout.strip() or 'unknown'}, bfloat16"

    def offline(self) -> ChildRun:
        """See `Engine`."""
        settings = {
            "model": self.model,
            "dtype": "bfloat16",
            "device": "cpu",
            "kv_cache_memory_bytes": KV_CACHE_MEMORY,
            "num_threads": self.num_threads,
        }
        return ChildRun(Child(self.name, sys.executable, __name__, self.environment()), settings)

    def environment(self) -> dict[str, str]:
        """See `Engine`."""
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "TRANSOM_KERNELS") if name in os.environ}
        return clean_environment(**kept)


@dataclass(frozen=True, kw_only=True)
class Variant(Transom):
    """Transom with other environment variables, with which the ordinary one is compared."""

    variables: dict[str, str]
    name: ClassVar[str] = "base"

    def environment(self) -> dict[str, str]:
        """See `Engine`."""
        return super().environment() | self.variables


class TransomChild:
    """One engine and the sequences that it decodes now."""

    _steps: Steps
    _batch = 0

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine."""
        begin_s = time.perf_counter()
        self._steps = Steps(build_engine(Settings.parse(**settings).engine_config()))
        return {"seconds": time.perf_counter() - begin_s}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds from the admission of one new prompt to its first token."""
        self._steps.stop()
        begin_s = time.perf_counter()
        self._steps.add(random_prompt(random.Random(), num_tokens))
        self._steps.until_started()
        return {"seconds": time.perf_counter() - begin_s}

    def start(self, batch: int, context: int) -> dict[str, Any]:
        """Start `batch` sequences and run until each has its first token, which stands at position `context`."""
        self._steps.stop()
        self._batch = batch
        for index in range(batch):
            self._steps.add(random_prompt(random.Random(f"{context} {index}"), context), salt="start")
        self._steps.until_started()
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of all started sequences."""
        begin_s = time.perf_counter()
        num_tokens = self._steps.tokens(steps)
        seconds = time.perf_counter() - begin_s
        if num_tokens != steps * self._batch:
            raise RuntimeError(
                f"{steps} steps of {self._batch} sequences gave {num_tokens} tokens; the KV pool is too small."
            )
        return {"seconds": seconds, "tokens": num_tokens}


if __name__ == "__main__":
    answer_calls(TransomChild())
