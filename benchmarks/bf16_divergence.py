"""How often bfloat16 greedy text depends on the batch: Transom's share of prompts, beside transformers' own.

    python benchmarks/bf16_divergence.py [--prompts 32] [--tokens 48]

Each engine answers every prompt alone and all at once (transformers padded on the left); a prompt counts when the two answers
differ anywhere. Both are also compared with transformers in float32.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from transformers import LlamaForCausalLM

from beside_transformers import load_transformers
from transom_worker import LLM, SamplingParams


@torch.inference_mode()
def ask_transformers(model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers to a batch of prompts."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return [row[width:].tolist() for row in out]


def ask_transom(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers to a batch of prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


def share_different(some: list[list[int]], others: list[list[int]]) -> float:
    """Share of answers that differ."""
    return sum(a != b for a, b in zip(some, others, strict=True)) / len(some)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    with LLM("smollm2", dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=options.prompts) as llm:
        text = llm.get_tokenizer().encode(inspect.getsource(argparse))
        prompts = [text[97 * i : 97 * i + 16 + 5 * i] for i in range(options.prompts)]
        ours = [ask_transom(llm, [p], options.tokens)[0] for p in prompts]
        ours_together = ask_transom(llm, prompts, options.tokens)
    model = load_transformers("smollm2")
    theirs = [ask_transformers(model, [p], options.tokens)[0] for p in prompts]
    theirs_together = ask_transformers(model, prompts, options.tokens)
    exact = [ask_transformers(model.float(), [p], options.tokens)[0] for p in prompts]
    print(f"{options.prompts} prompts, {options.tokens} tokens: share of answers that differ")
    print(f"  alone against all at once: Transom {share_different(ours, ours_together):.2f}, ", end="")
    print(f"transformers {share_different(theirs, theirs_together):.2f}")
    print(f"  bfloat16 against float32:  Transom {share_different(ours, exact):.2f}, ", end="")
    print(f"transformers {share_different(theirs, exact):.2f}")


if __name__ == "__main__":
    main()
