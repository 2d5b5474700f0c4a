"""transformers' continuous batching over the same random weights, asked for the same figures."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from gpu_engines import BATCHED_TOKENS, FIRST_STEPS, RUNS, middle, prompts
from gpu_geometries import weights_of

# Eager attention keeps all scores of a step: it gets fewer tokens at once, and no batch for which that would be so many bytes.
EAGER_BATCHED_TOKENS, EAGER_SCORES_BYTES = 512, 16 << 30


class Transformers:
    """`generate_batch`: paged attention by what is installed, else by torch's own, else eager."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        """The same weights, by the same names."""
        kind = _attention(config.model_type)
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kind)
        weights = weights_of(config, device)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights(name, shape=tuple(parameter.shape)))
        self._model.eval().set_attn_implementation(f"paged|{kind}")
        self._vocab_size, self.attention = config.vocab_size, kind
        self._heads, self._is_cuda = config.num_attention_heads, device.type == "cuda"
        eager_or_not = EAGER_BATCHED_TOKENS if kind == "eager" else BATCHED_TOKENS
        self._batched_tokens = eager_or_not if self._is_cuda else 256

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """See `Measured`; from the moment when it is no longer pending."""
        runs = [
            self._generate(prompts(1, num_tokens, self._vocab_size), 2)[0] for _ in range(2)
        ]  # each warms up by itself
        found = middle("seconds", [run.timestamps[0] - run.lifespan[0] for run in runs])
        return found | {"first_token": runs[0].generated_tokens[0], "attention": self.attention}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """See `Measured`; tokens between the moment when all have their first, and the end of the first that ends."""
        scores = 4 * self._heads * self._batched_tokens * batch * context
        if self.attention == "eager" and scores > EAGER_SCORES_BYTES:
            return {"status": "skipped", "error": f"eager attention would keep {scores / 2**30:.0f} GiB of scores"}
        before_all_begin = -(-batch * context // self._batched_tokens)
        found = self._generate(prompts(batch, context, self._vocab_size), before_all_begin + RUNS * steps + FIRST_STEPS)
        begin_s = max(one.timestamps[0] for one in found)
        end_s = min(one.timestamps[-1] for one in found)
        counted = sum(begin_s < moment <= end_s for one in found for moment in one.timestamps)
        if counted == 0:
            raise RuntimeError(
                "No step had all sequences in it: the first ended before the last began; measure more steps."
            )
        rate = counted / (end_s - begin_s)
        return {"step_s": batch / rate, "steps": counted // batch, "tokens_per_s": rate, "attention": self.attention}

    def close(self) -> None:
        """See `Measured`."""
        del self._model

    def _generate(self, inputs: list[list[int]], max_new_tokens: int) -> list[Any]:
        generation = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        sizes: dict[str, Any] = {"max_batch_tokens": self._batched_tokens}
        sizes |= {"max_memory_percent": 0.8} if self._is_cuda else {"num_blocks": 16}
        settings = ContinuousBatchingConfig(allow_block_sharing=False, **sizes)
        found = self._model.generate_batch(
            inputs, generation_config=generation, continuous_batching_config=settings, record_timestamps=True
        )
        wrong = [one.error for one in found.values() if one.error]
        if wrong or len(found) < len(inputs):
            raise RuntimeError(f"{len(found)} of {len(inputs)} prompts were answered; {wrong[:1]}")
        return list(found.values())


def _attention(family: str) -> str:
    if importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    return "eager" if family == "gpt_oss" else "sdpa"  # learned sinks
