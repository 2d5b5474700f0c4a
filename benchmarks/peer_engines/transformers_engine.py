"""transformers, with its fastest plain loop: bfloat16, SDPA, a dynamic cache, one arg-max a step. Offline figures only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from typing import ClassVar

from peer_engines.engine import (
    FOLDER,
    ChildRun,
    Engine,
    OfflineRun,
    ServerCommand,
    clean_environment,
    is_safetensors_folder,
)
from peer_engines.json_child import Child


@dataclass(frozen=True, kw_only=True)
class Transformers(Engine):
    """transformers, from the environment that runs the benchmark."""

    name: ClassVar[str] = "transformers"

    def missing(self) -> str:
        """See `Engine`."""
        if importlib.util.find_spec("transformers") is None:
            return "install transformers beside Transom"
        return "" if is_safetensors_folder(self.model) else "give --model a folder of safetensors"

    def version(self) -> str:
        """See `Engine`."""
        return f"{importlib.metadata.version('transformers')}, torch {importlib.metadata.version('torch')}, bfloat16, plain loop"

    def offline(self) -> OfflineRun:
        """See `Engine`."""
        child = Child(self.name, [sys.executable, str(FOLDER / "transformers_child.py")], clean_environment())
        return ChildRun(child, {"model": self.model, "num_threads": self.num_threads})

    def server(self, port: int) -> ServerCommand | None:
        """See `Engine`. `transformers serve` takes neither token ids nor `ignore_eos`, so it gets no HTTP figures."""
        return None
