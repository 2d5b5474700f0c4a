"""A child as `cpu_peers` starts it, whose engine computes nothing: its speed is what it was told."""

from typing import Any

from benchmarks.json_child import answer_calls


class StubEngineChild:
    _seconds_per_step: float

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        print("what a library prints")  # must not come between the answers
        if not settings:
            raise ValueError("no such model")
        self._seconds_per_step = settings["seconds_per_step"]
        return {"version": "1"}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        return {"seconds": num_tokens * self._seconds_per_step}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        return {"seconds": steps * self._seconds_per_step}


if __name__ == "__main__":
    answer_calls(StubEngineChild())
