"""Transom and transformers on the same weights, machine and minute: prefill and decode, taken in turns, as ratios.

    python benchmarks/beside_transformers.py [--batches 1,8,32] [--prompt-tokens 512] [--rounds 3] [--json FILE]

Absolute speeds of shared machines move by a factor of two within minutes; a ratio of the best of alternating rounds does not.
transformers gets its fastest plain loop: bfloat16, SDPA, a dynamic cache, one argmax a step, nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from transom_core.model_files.resolve import resolve_model
from transom_core.settings.settings import Settings
from transom_worker.bench.offline import OfflineBench
from transom_worker.engine.startup import build_engine
from transom_worker.models.weights import load_weights


def load_transformers(name: str) -> LlamaForCausalLM:
    """transformers' model with our weights, in bfloat16."""
    files = resolve_model(name)
    weights = load_weights(files)
    config = LlamaConfig(**{k: v for k, v in files.config.items() if k != "model_type"}, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    state = {name: weights(name).bfloat16() for name in weights.names}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model.eval()


@torch.inference_mode()
def transformers_prefill(model: LlamaForCausalLM, num_tokens: int) -> float:
    """Seconds for one prompt."""
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens))
    begin_s = time.perf_counter()
    model(ids, past_key_values=DynamicCache(), logits_to_keep=1).logits.argmax()
    return time.perf_counter() - begin_s


@torch.inference_mode()
def transformers_step(model: LlamaForCausalLM, batch: int, context: int, steps: int) -> float:
    """Seconds of one decode step of `batch` sequences."""
    cache = DynamicCache()
    ids = torch.randint(0, model.config.vocab_size, (batch, context))
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    begin_s = time.perf_counter()
    for _ in range(steps):
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - begin_s) / steps


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer = load_transformers(options.model)
    context = options.prompt_tokens
    benches = {}
    for quantization in ("none", "int8"):
        settings = Settings.parse(model=options.model, dtype="bfloat16", quantization=quantization)
        benches[quantization] = OfflineBench(build_engine(settings.engine_config()), prompt_tokens=context)
        benches[quantization].decode(1, 4)
    rows = []
    for batch in [0, *map(int, options.batches.split(","))]:
        best = dict.fromkeys(("transformers", *benches), float("inf"))
        for _ in range(options.rounds):
            for name, bench in benches.items():
                seconds = bench.decode(batch, options.steps).step_ms / 1e3 if batch else bench.prefill()
                best[name] = min(best[name], seconds)
            seconds = (
                transformers_step(peer, batch, context, options.steps) if batch else transformers_prefill(peer, context)
            )
            best["transformers"] = min(best["transformers"], seconds)
        tokens = batch or context
        rows.append(
            {
                "what": f"decode, batch {batch}" if batch else f"prefill of {context}",
                "transom bf16": tokens / best["none"],
                "transom int8": tokens / best["int8"],
                "transformers bf16": tokens / best["transformers"],
                "bf16 ratio": best["transformers"] / best["none"],
                "int8 ratio": best["transformers"] / best["int8"],
            }
        )
        print(
            "  ".join(f"{k}: {v if isinstance(v, str) else format(v, '.2f')}" for k, v in rows[-1].items()), flush=True
        )
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
