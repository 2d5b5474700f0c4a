"""Transom, from the source tree or environment that runs the benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

from peer_engines.engine import FOLDER, SERVED_NAME, ChildRun, Engine, OfflineRun, ServerCommand, clean_environment
from peer_engines.json_child import Child

KV_CACHE_MEMORY = "2GiB"  # as vLLM gets


@dataclass(frozen=True, kw_only=True)
class Transom(Engine):
    """Transom. `serve_arguments` are added to `transom serve`."""

    serve_arguments: tuple[str, ...] = ()
    name: ClassVar[str] = "transom"

    def missing(self) -> str:
        """See `Engine`. The benchmark itself runs in Transom's environment."""
        return ""

    def version(self) -> str:
        """See `Engine`."""
        found = subprocess.run(
            ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        arguments = f", serve {' '.join(self.serve_arguments)}" if self.serve_arguments else ""
        return f"commit {found.stdout.strip() or 'unknown'}, bfloat16{arguments}"

    def offline(self) -> OfflineRun:
        """See `Engine`."""
        settings = {
            "model": self.model,
            "dtype": "bfloat16",
            "device": "cpu",
            "kv_cache_memory_bytes": KV_CACHE_MEMORY,
            "num_threads": self.num_threads,
        }
        command = [sys.executable, str(FOLDER / "transom_child.py")]
        return ChildRun(Child(self.name, command, self._environment()), settings)

    def server(self, port: int) -> ServerCommand | None:
        """See `Engine`."""
        flags = {
            "--served-model-name": SERVED_NAME,
            "--dtype": "bfloat16",
            "--device": "cpu",
            "--num-threads": str(self.num_threads),
            "--kv-cache-memory-bytes": KV_CACHE_MEMORY,
            "--port": str(port),
        }
        command = [sys.executable, "-m", "transom_cluster.cli", "serve", self.model]
        command += [part for pair in flags.items() for part in pair]
        return ServerCommand(command=[*command, *self.serve_arguments], environment=self._environment())

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "TRANSOM_KERNELS") if name in os.environ}
        return clean_environment(**kept)
