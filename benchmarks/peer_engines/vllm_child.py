"""vLLM without HTTP, as a child that answers `load`, `prefill`, `start` and `decode`. Runs under vLLM's own Python.

`LLM.generate` is the interface that its users measure. The time of decode steps is the time for 1 + steps tokens less the time for
1 token, both for prompts that the prefix cache already holds, as far as they fill its blocks.
"""

from __future__ import annotations

import random
import time
from typing import Any

from json_child import answer_calls

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000


class VllmChild:
    """One engine and the prompts that it decodes now."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._prompts: list[list[int]] = []

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the engine. Its first start on a machine compiles for one to two minutes."""
        from vllm import LLM

        begin_s = time.perf_counter()
        self._llm = LLM(**settings, enable_prefix_caching=True, disable_log_stats=True)
        return {"seconds": time.perf_counter() - begin_s}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds for one new prompt and its first token."""
        return {"seconds": self._generate([draw(random.Random(), num_tokens)], 1)}

    def start(self, batch: int, context: int) -> dict[str, Any]:
        """Bring the prompts of this batch into the prefix cache; one token more than full blocks, so that all of them are found."""
        self._prompts = [draw(random.Random(f"{context} {index}"), context + 1) for index in range(batch)]
        self._generate(self._prompts, 1)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` decode steps of the started prompts."""
        first_s = self._generate(self._prompts, 1)
        all_s = self._generate(self._prompts, 1 + steps)
        return {"seconds": all_s - first_s, "tokens": steps * len(self._prompts)}

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        begin_s = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_tokens}:
            raise RuntimeError(f"Outputs of {sorted(lengths)} tokens came where {num_tokens} were asked for.")
        return seconds


def draw(generator: random.Random, num_tokens: int) -> list[int]:
    """Random token ids, without special tokens."""
    return [generator.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(num_tokens)]


if __name__ == "__main__":
    child = VllmChild()
    answer_calls({"load": child.load, "prefill": child.prefill, "start": child.start, "decode": child.decode})
