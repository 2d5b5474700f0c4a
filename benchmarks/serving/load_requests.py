"""What the load generator asks: prompts and answer lengths drawn from ranges, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FIRST_TOKEN_ID = 1000  # below lie special tokens and single bytes, in every vocabulary that we know
LAST_TOKEN_ID = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How requests are drawn: lengths in tokens, both ends included.

    Prompts are token ids, so that lengths are exact. `shared_prefix_tokens` of every prompt are the same; the rest is its own.
    """

    model: str
    prompt_tokens: tuple[int, int] = (32, 512)
    output_tokens: tuple[int, int] = (16, 128)
    shared_prefix_tokens: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """The workload in a few words."""
        prompt, output = ("-".join(map(str, ends)) for ends in (self.prompt_tokens, self.output_tokens))
        shared = f", first {self.shared_prefix_tokens} shared" if self.shared_prefix_tokens else ""
        return f"prompts {prompt}{shared}, answers {output} tokens"

    def bodies(self, label: str) -> Iterator[dict[str, Any]]:
        """Request bodies without end; another label draws other prompts, so that runs do not hit each other's cache."""
        shared = self._draw(random.Random(f"{self.seed}/shared"), self.shared_prefix_tokens)
        stream = random.Random(f"{self.seed}/{label}")
        while True:
            num_prompt_tokens = stream.randint(*self.prompt_tokens)
            own = self._draw(stream, max(1, num_prompt_tokens - len(shared)))
            yield self._body([*shared, *own], stream.randint(*self.output_tokens))

    def _draw(self, source: random.Random, count: int) -> list[int]:
        return [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
