"""Transom's engine without HTTP, as a child that answers `load`, `prefill`, `start`, `start_behind` and `decode`. See `json_child`.

The prompts of one context length are the same every time, and the prompts of a smaller batch are the first of a larger one. So
only their first start computes them: later starts find them in the prefix cache and begin to decode at once.
"""

from __future__ import annotations

import random
import time
from typing import Any

from json_child import answer_calls

from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000  # random prompts without special tokens


class TransomChild:
    """One engine and the sequences that it decodes now."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._running: list[str] = []
        self._num_requests = 0

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine."""
        begin_s = time.perf_counter()
        self._engine = build_engine(Settings.parse(**settings).engine_config())
        return {"seconds": time.perf_counter() - begin_s}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds from the admission of one new prompt to its first token."""
        self._stop_all()
        begin_s = time.perf_counter()
        self._add(_random_prompt(random.Random(), num_tokens))
        self._steps_until_all_started()
        return {"seconds": time.perf_counter() - begin_s}

    def start(self, batch: int, context: int) -> dict[str, Any]:
        """Start `batch` sequences and run until each has its first token, which stands at position `context`."""
        return self.start_behind(
            [_random_prompt(random.Random(f"{context} {index}"), context) for index in range(batch)]
        )

    def start_behind(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Start a sequence behind each prompt and run until each has its first token."""
        self._stop_all()
        for prompt in prompts:
            self._add(prompt)
        first = self._steps_until_all_started()
        return {"first_tokens": [first[request_id] for request_id in self._running]}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of all started sequences, those outside forward passes, and each sequence's tokens."""
        engine = self._built()
        forward_begin_s, begin_s, events = engine.forward_s, time.perf_counter(), []
        for _ in range(steps):
            events += engine.step()
        seconds = time.perf_counter() - begin_s
        num_tokens = sum(len(event.token_ids) for event in events)
        if num_tokens != steps * len(self._running):
            raise RuntimeError(
                f"{steps} steps of {len(self._running)} sequences gave {num_tokens} tokens; the KV pool is too small."
            )
        return {
            "seconds": seconds,
            "tokens": num_tokens,
            "outside_forward_s": seconds - (engine.forward_s - forward_begin_s),
            "token_ids": [
                [token_id for event in events if event.request_id == request_id for token_id in event.token_ids]
                for request_id in self._running
            ],
        }

    def _built(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("`load` comes first.")
        return self._engine

    def _add(self, prompt: list[int]) -> None:
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        self._built().add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
                seed=0,
            )
        )
        self._running.append(request_id)

    def _steps_until_all_started(self) -> dict[str, int]:
        """Step until every running sequence has a token; return the first token of each."""
        first: dict[str, int] = {}
        while len(first) < len(self._running):
            for event in self._built().step():
                if event.error is not None:
                    raise RuntimeError(f"{event.request_id}: {event.error}")
                if event.token_ids:
                    first.setdefault(event.request_id, event.token_ids[0])
        return first

    def _stop_all(self) -> None:
        engine = self._built()
        for request_id in self._running:
            engine.abort(request_id)
        self._running.clear()
        while engine.has_work:
            engine.step()


def _random_prompt(generator: random.Random, num_tokens: int) -> list[int]:
    return [generator.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(num_tokens)]


if __name__ == "__main__":
    child = TransomChild()
    calls = (child.load, child.prefill, child.start, child.start_behind, child.decode)
    answer_calls({call.__name__: call for call in calls})
