"""A child as `cpu_peers` starts it, whose engine computes nothing: its speed is what SECONDS_PER_STEP says."""

import os
from typing import Any

from benchmarks.json_child import answer_calls

SECONDS_PER_STEP = float(os.environ.get("SECONDS_PER_STEP", "0.25"))


class StubEngineChild:
    def __init__(self) -> None:
        self._running = 0

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        print("what a library prints")  # must not come between the answers
        if settings.get("model") == "broken":
            raise ValueError("no such model")
        return {"seconds": 1.0}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        return {"seconds": num_tokens * SECONDS_PER_STEP}

    def start(self, batch: int, context: int) -> dict[str, Any]:
        self._running = batch
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        return {"seconds": steps * SECONDS_PER_STEP, "tokens": steps * self._running}


if __name__ == "__main__":
    answer_calls(StubEngineChild())
