"""What 8 and 4 bits cost in quality: agreement with bfloat16's greedy text and KL divergence from its distributions.

    python benchmarks/quantised_quality.py [--model smollm2] [--tokens 64] [--json FILE]

The model in bfloat16 answers 64 chat prompts greedily, 64 tokens each (fewer where it ends its answer). Then each variant gets
prompt and answer as one input (teacher forcing), so that all variants see the same context, and for each token of the answers:

- agreement: the share of tokens where the variant and bfloat16 find the same token most likely.
- KL: KL(bfloat16 || variant) of the distributions over the vocabulary, in nats: its mean, and the value that 99 % of the tokens
  are below.

float32 is a variant, too: bfloat16's own rounding is the measure for the others.

The demo's weights come from a file with 16 levels a group, which 4 bits with a minimum hold nearly exactly. `--noise 0.5` adds
Gaussian noise to all matrices, of half the height of such a level, so that no weight lies on one, as in a model that was never
quantised. Variants are then compared with the noisy model in bfloat16; `gguf` is none of them, since nothing is stored so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from transom_core.config import ModelConfig
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker import LLM, SamplingParams
from transom_worker.execution.setup.model_loading import LoadedModel, load_model
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.weights import load_weights

VARIANTS = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {"quantization": "gguf"},
}
TOPICS = (
    "the sea", "a lighthouse", "gravity", "the Roman Empire", "bread", "photosynthesis", "a lost key", "the human heart",
    "chess", "volcanoes", "a train journey", "prime numbers", "the moon", "honey bees", "a rainy day", "computer networks",
)  # fmt: skip
FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write a letter to a friend about {}.",
)
BLOCK = 16


def answers(model: str, num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and bfloat16's greedy answers, as token ids."""
    with LLM(model, dtype="bfloat16", max_num_seqs=16) as llm:
        chats = [[{"role": "user", "content": form.format(topic)}] for topic in TOPICS for form in FORMS]
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
        return [(list(out.prompt_token_ids), list(out.outputs[0].token_ids)) for out in outputs]


@torch.inference_mode()
def log_probabilities(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The log-probabilities from which each token of the answer is chosen, [tokens, vocabulary]."""
    ids = [*prompt, *answer[:-1]]
    num_blocks = -(-len(ids) // BLOCK)
    caches = []
    for layer in loaded.architecture.layers:
        shape = (num_blocks, layer.num_kv_heads, BLOCK, layer.head_size)
        keys, values = (torch.zeros(shape, dtype=getattr(torch, loaded.dtype)).transpose(1, 2) for _ in range(2))
        caches.append(LayerCache(k=keys, v=values))
    zero = torch.zeros(1, dtype=torch.int32)
    group = PagedBatch(
        block_size=BLOCK,
        num_sink_blocks=0,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        first_block=zero,
        attend_from=zero,
        slots=torch.arange(len(ids)),
        query_offset=torch.tensor([0, len(ids)], dtype=torch.int32),
        start=zero,
        block_table_host=[list(range(num_blocks))],
        first_block_host=[0],
        attend_from_host=[0],
        start_host=[0],
        count_host=[len(ids)],
    )
    batch = ForwardBatch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        groups=(group,),
        group_of_layer=(0,) * len(caches),
        caches=tuple(caches),
        logit_rows=torch.arange(len(prompt) - 1, len(ids)),
    )
    logits: torch.Tensor = loaded.model.forward(batch)
    return logits.log_softmax(dim=-1)


def compare(loaded: LoadedModel, base: LoadedModel, texts: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Agreement and KL over all texts."""
    agree, divergence = [], []
    for prompt, answer in texts:
        own, wanted = log_probabilities(loaded, prompt, answer), log_probabilities(base, prompt, answer)
        agree.append(own.argmax(dim=-1) == wanted.argmax(dim=-1))
        divergence.append((wanted.exp() * (wanted - own)).sum(dim=-1))
    kl = torch.cat(divergence)
    return {
        "agreement": round(torch.cat(agree).double().mean().item(), 4),
        "kl_mean": round(kl.mean().item(), 5),
        "kl_99": round(kl.quantile(0.99).item(), 4),
        "weight_mb": round(loaded.model.weight_bytes / 1e6, 1),
    }


class NoisyWeights:
    """An open checkpoint whose matrices have noise, the same for each reading."""

    def __init__(self, weights: Any, noise: float) -> None:
        self._weights, self._noise = weights, noise
        self.names, self.close = weights.names, weights.close

    @property
    def unread(self) -> tuple[str, ...]:
        """What was not read yet."""
        return tuple(self._weights.unread)

    def __call__(self, name: str, **options: Any) -> torch.Tensor:
        """Read one tensor; matrices get their noise."""
        tensor = self._weights(name, **options)
        if tensor.dim() != 2 or tensor.shape[1] % 32:
            return torch.as_tensor(tensor)
        low, high = tensor.float().view(len(tensor), -1, 32).aminmax(dim=-1, keepdim=True)
        random = torch.Generator().manual_seed(len(name) * 1000 + sum(name.encode()))
        noise = (
            torch.randn(tensor.numel(), generator=random).view(len(tensor), -1, 32) * (high - low) * (self._noise / 15)
        )
        return tensor + noise.view_as(tensor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = answers(options.model, options.tokens)
    total = sum(len(answer) for _, answer in texts)
    print(f"{len(texts)} prompts, {total} tokens of answers")
    if options.noise:
        mock.patch(
            "transom_worker.execution.setup.model_loading.load_weights",
            lambda files: NoisyWeights(load_weights(files), options.noise),
        ).start()
    base = load_model(ModelConfig(model=options.model, device="cpu", dtype="bfloat16"))
    result: dict[str, Any] = {
        "model": options.model,
        "prompts": len(texts),
        "tokens": total,
        "noise": options.noise,
        "variants": {},
    }
    for name in ("bfloat16", *options.variants.split(",")):
        settings: dict[str, Any] = {"dtype": "bfloat16", **VARIANTS.get(name, {})}
        loaded = load_model(ModelConfig(model=options.model, device="cpu", **settings))
        figures = compare(loaded, base, texts)
        result["variants"][name] = figures
        print(f"{name:10s}", "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
