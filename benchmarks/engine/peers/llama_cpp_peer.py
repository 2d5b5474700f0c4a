"""llama.cpp: `llama-bench` for prompts, `llama-batched-bench` for decode steps, `llama-server` over HTTP."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.engine.peers.engine import (
    SERVED_NAME,
    Engine,
    OfflineRun,
    clean_environment,
    flag_list,
)

TOOLS = ("llama-bench", "llama-batched-bench", "llama-server")
CONTEXT_MULTIPLE = 256
SERVER_SLOTS, SERVER_CONTEXT = 16, 16_384
TOOL_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Engine):
    """llama.cpp. `folder` holds its programs; `gguf` is the same model, as a bfloat16 GGUF file for equal weights."""

    folder: str
    gguf: str
    name: ClassVar[str] = "llama.cpp"

    def missing(self) -> str:
        """See `Engine`."""
        if not self.folder:
            return "give --llama-cpp, the folder of llama.cpp's programs"
        for tool in TOOLS:
            if not (Path(self.folder) / tool).exists():
                return f"--llama-cpp {self.folder} has no {tool}"
        if not self.gguf:
            return "give --gguf, the model as a bfloat16 GGUF file"
        return "" if Path(self.gguf).exists() else f"--gguf {self.gguf} does not exist"

    def version(self) -> str:
        """See `Engine`."""
        bench = LlamaTools(self).bench(16)
        return f"build {bench['build_commit']}, {bench['model_type']}"

    def offline(self) -> OfflineRun:
        """See `Engine`."""
        return LlamaTools(self)

    def server(self, port: int) -> list[str]:
        """See `Engine`."""
        flags = {
            "-m": self.gguf,
            "-t": str(self.num_threads),
            "-np": str(SERVER_SLOTS),
            "-c": str(SERVER_CONTEXT),
            "--alias": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        return [str(Path(self.folder) / "llama-server"), *flag_list(flags)]


class LlamaTools:
    """Runs one of llama.cpp's own benchmarks for each figure. Each run loads the model, which its figure does not count."""

    def __init__(self, engine: LlamaCpp) -> None:
        self._engine = engine

    def prefill(self, num_tokens: int) -> float:
        """See `OfflineRun`."""
        return float(self.bench(num_tokens)["avg_ts"])  # type: ignore[arg-type]

    def decode(self, batch: int, context: int, steps: int) -> float:
        """See `OfflineRun`."""
        needed = batch * (context + steps)
        cells = -(-needed // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        lengths = ["-npp", str(context), "-ntg", str(steps), "-npl", str(batch)]
        text = self._run("llama-batched-bench", "-c", str(cells), "-b", "2048", *lengths, "--output-format", "jsonl")
        return decode_speed(text)

    def stop(self) -> None:
        """See `OfflineRun`. Nothing runs between two figures."""

    def bench(self, num_tokens: int) -> dict[str, object]:
        """What `llama-bench` says of one prompt."""
        return bench_result(self._run("llama-bench", "-p", str(num_tokens), "-n", "0", "-r", "1", "-o", "json"))

    def _run(self, tool: str, *arguments: str) -> str:
        engine = self._engine
        command = [str(Path(engine.folder) / tool), "-m", engine.gguf, "-t", str(engine.num_threads), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=clean_environment(), timeout=TOOL_TIMEOUT_S, errors="replace"
        )
        if done.returncode:
            raise RuntimeError(f"{tool} ended with code {done.returncode}: {done.stderr[-1000:]}")
        return done.stdout


def bench_result(text: str) -> dict[str, object]:
    """The only result in `llama-bench`'s JSON."""
    (result,) = json.loads(text)
    return dict(result)


def decode_speed(text: str) -> float:
    """Decode tokens per second in `llama-batched-bench`'s output, which has one line of JSON among other lines."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (row,) = rows
    return float(row["speed_tg"])
