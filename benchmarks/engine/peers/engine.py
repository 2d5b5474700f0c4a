"""What `cpu_peers` needs of an engine: whether it is installed, and how it runs.

Each engine is one small class derived from `Engine`. An engine in Python runs offline in a child process, which is the same module
run as a program under that engine's Python, and which answers `load`, `prefill`, `start` and `decode`; `ChildRun` turns these calls
into tokens per second. This file uses the standard library only, since every engine's Python imports it.
"""

import os
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.json_child import Child

NOT_INHERITED = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "PYTHONPATH", "VIRTUAL_ENV", "TRANSOM_KERNELS")
LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000  # of random prompts: no special tokens


class ChildRun:
    """A loaded engine, in a child that answers calls. Its figures are tokens per second."""

    def __init__(self, child: Child, settings: dict[str, Any]) -> None:
        """Load the engine in the child, and compute once what is computed in every round. Raises ChildError."""
        self._child = child
        try:
            child.call("load", settings=settings)
            child.call("prefill", num_tokens=512)
            child.call("start", batch=4, context=16)
            child.call("decode", steps=8)
        except BaseException:
            child.stop()
            raise

    def prefill(self, num_tokens: int) -> float:
        """The speed of one new prompt, from its arrival to its first token."""
        return num_tokens / float(self._child.call("prefill", num_tokens=num_tokens)["seconds"])

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The speed of `batch` sequences together over `steps` steps, after prompts of `context` tokens."""
        self._child.call("start", batch=batch, context=context)
        figures = self._child.call("decode", steps=steps)
        return float(figures["tokens"]) / float(figures["seconds"])

    def stop(self) -> None:
        """End the engine's processes."""
        self._child.stop()


@dataclass(frozen=True, kw_only=True)
class Engine(ABC):
    """One engine on this machine. `model` is a folder of bfloat16 safetensors, and `num_threads` the number of cores to use."""

    name: ClassVar[str]
    model: str
    num_threads: int

    @abstractmethod
    def missing(self) -> str:
        """What has to be installed or given before this engine can run; empty if nothing."""

    @abstractmethod
    def version(self) -> str:
        """Version and settings, for the report."""

    @abstractmethod
    def offline(self) -> ChildRun:
        """Load the engine."""

    def environment(self) -> dict[str, str]:
        """The variables of its processes."""
        return clean_environment()


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without what would change an engine's speed or imports, and with `added`."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | added


def random_prompt(generator: random.Random, num_tokens: int) -> list[int]:
    """Random token ids."""
    return [generator.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(num_tokens)]
