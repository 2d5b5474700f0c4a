"""What number formats of the KV cache cost and give: bytes, quality, requests that fit, and speed, by length of the context.

    python benchmarks/kv_dtypes.py [--model smollm2] [--formats fp8,int8,int4] [--contexts 1024,4096,8192] [--json FILE]

The model runs in bfloat16 over real text, the documents of this repository. All formats get the same tokens (teacher forcing), in
one chunk, and are compared with a bfloat16 cache on the last 256 tokens of each piece of text, which is one context long:

- KL: KL(bfloat16 || format) of the distributions over the vocabulary, in nats: its mean, and the value that 99 % of tokens are
  below.
- agreement: the share of tokens where both find the same token most likely, which is what greedy decoding would take.

A format with `-plain` keeps int4 keys without their Hadamard rotation, to show what that is worth. "fit" are the requests of a
context's length in `--memory` of KV pool. Tokens a second are those of one sequence behind such a context: the median of the times
of 32 decode steps. Machines are noisy, so formats take turns, and the ratio to bfloat16 is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.byte_sizes import parse_bytes
from transom_worker.config import ModelConfig
from transom_worker.execution.batch.slab import allocate_slab, layer_caches
from transom_worker.execution.model_loading import LoadedModel, load_model
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.model_files.resolve import resolve_config, resolve_text_files
from transom_worker.planner import cache_groups, make_layout, plan_from_config
from transom_worker.text.tokenizer import Tokenizer

BASE = "bfloat16"
BLOCK = 16
COMPARED = 256  # last tokens of a piece of text
DECODED = 32
PIECES = {1024: 4}  # of other contexts: 1
DOCUMENTS = Path(__file__).resolve().parent.parent / "docs"


class Sequence:
    """One sequence whose blocks lie in order in a slab of its own."""

    def __init__(self, loaded: LoadedModel, asked: str, num_tokens: int) -> None:
        plain = asked.endswith("-plain")
        groups = cache_groups(
            loaded.architecture, block_size=BLOCK, dtype=loaded.dtype, kv_cache_dtype=asked.removesuffix("-plain")
        )
        (group,) = groups  # a model whose layers keep every token
        self._loaded, self.num_blocks = loaded, -(-num_tokens // BLOCK)
        self.layout: ArenaLayout = make_layout(groups, (self.num_blocks + 8) * group.stride_bytes)
        caches = layer_caches(self.layout, allocate_slab(self.layout, loaded.device))
        self._caches: tuple[LayerCache, ...] = tuple(replace(one, hadamard=False) if plain else one for one in caches)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], start: int, num_rows: int) -> torch.Tensor:
        """Compute tokens from position `start` on; return the log-probabilities behind the last `num_rows`, [rows, V]."""
        end = start + len(token_ids)
        zero, first = torch.zeros(1, dtype=torch.int32), torch.tensor([start], dtype=torch.int32)
        group = PagedBatch(
            block_size=BLOCK,
            num_sink_blocks=0,
            block_table=torch.arange(self.num_blocks, dtype=torch.int32)[None],
            first_block=zero,
            attend_from=zero,
            slots=torch.arange(start, end),
            query_offset=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            start=first,
            block_table_host=[list(range(self.num_blocks))],
            first_block_host=[0],
            attend_from_host=[0],
            start_host=[start],
            count_host=[len(token_ids)],
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(start, end),
            groups=(group,),
            group_of_layer=(0,) * len(self._caches),
            caches=self._caches,
            logit_rows=torch.arange(len(token_ids) - num_rows, len(token_ids)),
        )
        logits: torch.Tensor = self._loaded.model.forward(batch)
        return logits.float().log_softmax(dim=-1)

    def decode_seconds(self, token_ids: list[int], start: int) -> float:
        """The median seconds of a step that computes one of these tokens."""
        spent = []
        for at, token_id in enumerate(token_ids):
            begin = time.perf_counter()
            self.forward([token_id], start + at, 1)
            spent.append(time.perf_counter() - begin)
        return statistics.median(spent)


def measure(
    loaded: LoadedModel, formats: list[str], pieces: list[list[int]], context: int
) -> dict[str, dict[str, float]]:
    """Quality and speed of each format, the base included, over pieces of `context` tokens and those decoded behind them."""
    agree: dict[str, list[torch.Tensor]] = {name: [] for name in formats}
    divergence: dict[str, list[torch.Tensor]] = {name: [] for name in formats}
    seconds: dict[str, list[float]] = {name: [] for name in formats}
    for piece in pieces:
        wanted: torch.Tensor | None = None
        for name in formats:
            sequence = Sequence(loaded, name, context + DECODED)
            got = sequence.forward(piece[:context], 0, COMPARED)
            wanted = got if wanted is None else wanted
            agree[name].append(got.argmax(dim=-1) == wanted.argmax(dim=-1))
            divergence[name].append((wanted.exp() * (wanted - got)).sum(dim=-1))
            seconds[name].append(sequence.decode_seconds(piece[context:], context))
    return {
        name: {
            "kl_mean": round(torch.cat(divergence[name]).mean().item(), 5),
            "kl_99": round(torch.cat(divergence[name]).quantile(0.99).item(), 4),
            "agreement": round(torch.cat(agree[name]).double().mean().item(), 4),
            "tokens_per_s": round(1 / statistics.median(seconds[name]), 1),
        }
        for name in formats
    }


def plan_figures(model: str, asked: str, context: int, memory: int) -> dict[str, float]:
    """Bytes per token, and the requests of this length that fit."""
    plan = plan_from_config(
        resolve_config(model), memory_bytes=memory, max_model_len=context, kv_cache_dtype=asked.removesuffix("-plain")
    )
    return {"bytes_per_token": plan.groups[0].bytes_per_token, "fit": plan.concurrency[-1].requests}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", default="fp8,int8,int4,int4-plain")
    parser.add_argument("--contexts", default="1024,4096,8192")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = load_model(ModelConfig(model=options.model, device="cpu", dtype=BASE))
    tokenizer = Tokenizer.load(resolve_text_files(options.model))
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    token_ids = tokenizer.encode(text)
    formats, memory = [BASE, *options.formats.split(",")], parse_bytes(options.memory, name="--memory")
    result: dict[str, Any] = {"model": options.model, "memory": options.memory, "contexts": {}}
    for context in map(int, options.contexts.split(",")):
        length = context + DECODED
        pieces = [token_ids[at * length : (at + 1) * length] for at in range(PIECES.get(context, 1))]
        figures = measure(loaded, formats, pieces, context)
        for name in formats:
            figures[name] |= plan_figures(options.model, name, context, memory)
            print(
                f"{context:6d} {name:12s}",
                "  ".join(f"{key} {value}" for key, value in figures[name].items()),
                flush=True,
            )
        result["contexts"][context] = figures
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
