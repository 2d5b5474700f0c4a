"""What `cpu_peers` knows of an engine, and an engine that runs.

An engine runs in a child process: a module of this package as a program, under the engine's own Python, with its own environment
variables. The child answers `load`, `prefill` and `decode`; `RunningEngine` turns the answers into tokens per second. This file
uses the standard library only, since every engine's Python imports it.
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any

from benchmarks.json_child import Child

NOT_INHERITED = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "PYTHONPATH", "VIRTUAL_ENV", "TRANSOM_KERNELS")
LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000  # of random prompts: no special tokens


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine on this machine, or what has to be installed or given before it can run (`missing`)."""

    name: str
    python: str
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""


class RunningEngine:
    """A loaded engine, in a child that answers calls. Its figures are tokens per second."""

    def __init__(self, engine: Engine) -> None:
        """Load the engine in the child, and compute once what is computed in every round. Raises ChildError."""
        self._child = Child(engine.name, engine.python, engine.module, engine.environment)
        try:
            self.version = str(self._child.call("load", settings=engine.settings)["version"])
            self.prefill(512)
            self.decode(4, 16, 8)
        except BaseException:
            self.stop()
            raise

    def prefill(self, num_tokens: int) -> float:
        """The speed of one new prompt, from its arrival to its first token."""
        return num_tokens / float(self._child.call("prefill", num_tokens=num_tokens)["seconds"])

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The speed of `batch` sequences together over `steps` steps, after prompts of `context` tokens."""
        return batch * steps / float(self._child.call("decode", batch=batch, context=context, steps=steps)["seconds"])

    def stop(self) -> None:
        """End the engine's process."""
        self._child.stop()


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without what would change an engine's speed or imports, and with `added`."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | added


def random_prompt(generator: random.Random, num_tokens: int) -> list[int]:
    """Random token ids."""
    return [generator.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(num_tokens)]
