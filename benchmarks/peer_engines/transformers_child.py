"""transformers without HTTP, as a child that answers `load`, `prefill`, `start` and `decode`. See `json_child`."""

from __future__ import annotations

import time
from typing import Any

import torch
from json_child import answer_calls
from transformers import AutoModelForCausalLM, DynamicCache

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000


class TransformersChild:
    """One model, the cache of one batch, and its size (batch, context) when no step had been taken."""

    def __init__(self) -> None:
        self._model: Any = None
        self._cache = DynamicCache()
        self._started = (0, 0)
        self._token = torch.empty(0)

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the model."""
        begin_s = time.perf_counter()
        torch.set_num_threads(settings["num_threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        return {"seconds": time.perf_counter() - begin_s}

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds for one new prompt and its first token."""
        ids = torch.randint(LOWEST_TOKEN, HIGHEST_TOKEN, (1, num_tokens))
        begin_s = time.perf_counter()
        self._next(ids, DynamicCache()).tolist()
        return {"seconds": time.perf_counter() - begin_s}

    @torch.inference_mode()
    def start(self, batch: int, context: int) -> dict[str, Any]:
        """Compute the prompts of this batch, or drop what steps added to their cache since they were computed."""
        if self._started == (batch, context):
            extra = self._cache.get_seq_length() - context
            self._cache.crop(-extra)
        else:
            self._cache, self._started = DynamicCache(), (batch, context)
            self._token = self._next(torch.randint(LOWEST_TOKEN, HIGHEST_TOKEN, (batch, context)), self._cache)
        return {}

    @torch.inference_mode()
    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of the started batch."""
        token = self._token
        begin_s = time.perf_counter()
        for _ in range(steps):
            token = self._next(token, self._cache)
        token.tolist()
        return {"seconds": time.perf_counter() - begin_s, "tokens": steps * len(token)}

    def _next(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self._model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)


if __name__ == "__main__":
    child = TransformersChild()
    answer_calls({"load": child.load, "prefill": child.prefill, "start": child.start, "decode": child.decode})
