"""What number formats of the KV cache cost and give: bytes, quality, requests that fit, and speed, by length of the context.

    python benchmarks/kv_dtypes.py [--model smollm2] [--formats fp8,int8,int4] [--contexts 1024,4096,8192] [--json FILE]

The model runs in bfloat16 over real text, the documents of this repository.

Quality: all formats get the same tokens (teacher forcing), in one chunk, and are compared with a bfloat16 cache on the last 256
tokens of each piece of text, which is one context long:

- KL: KL(bfloat16 || format) of the distributions over the vocabulary, in nats: its mean, and the value that 99 % of tokens are
  below.
- agreement: the share of tokens where both find the same token most likely, which is what greedy decoding would take.

A format with `-plain` keeps int4 keys without their Hadamard rotation, to show what that is worth. "fit" are the requests of a
context's length in `--memory` of KV pool.

Speed: each format has an engine in a child process. All decode greedily behind the same texts, `--batches` sequences at once, and
take turns, so that a machine whose speed moves slows all of them: what counts is the ratio to bfloat16 in the same round (the
median of the rounds). "same greedily" are the decoded tokens before the first that differs from bfloat16's, of all decoded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peer_engines.json_child import Child
from transom_core.config import ModelConfig
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.model_files.resolve import resolve_config, resolve_text_files
from transom_core.settings.byte_sizes import parse_bytes
from transom_core.text.tokenizer import Tokenizer
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.execution.setup.model_loading import LoadedModel, load_model
from transom_worker.execution.tiers.device_slab import allocate_slab, layer_caches
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.planner import cache_groups, make_layout, plan_from_config

BASE = "bfloat16"
BLOCK = 16
COMPARED = 256  # last tokens of a piece of text
DECODED = 32  # tokens of each sequence in each round
ROOM = 128  # tokens of a context that are left for those, and for what the first sequence decodes while others begin
ROUNDS = 5
PIECES = {1024: 4}  # of other contexts: 1
CHILD = Path(__file__).parent / "peer_engines" / "transom_child.py"
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


def measure_quality(
    loaded: LoadedModel, formats: list[str], pieces: list[list[int]], context: int
) -> dict[str, dict[str, float]]:
    """Quality of each format, the base included, over pieces of `context` tokens."""
    agree: dict[str, list[torch.Tensor]] = {name: [] for name in formats}
    divergence: dict[str, list[torch.Tensor]] = {name: [] for name in formats}
    for piece in pieces:
        wanted: torch.Tensor | None = None
        for name in formats:
            got = Sequence(loaded, name, context).forward(piece[:context], 0, COMPARED)
            wanted = got if wanted is None else wanted
            agree[name].append(got.argmax(dim=-1) == wanted.argmax(dim=-1))
            divergence[name].append((wanted.exp() * (wanted - got)).sum(dim=-1))
    return {
        name: {
            "kl_mean": round(torch.cat(divergence[name]).mean().item(), 5),
            "kl_99": round(torch.cat(divergence[name]).quantile(0.99).item(), 4),
            "agreement": round(torch.cat(agree[name]).double().mean().item(), 4),
        }
        for name in formats
    }


class Engines:
    """An engine in a child process for each format, all of which decode behind the same texts in turns."""

    def __init__(self, model: str, formats: list[str], pool: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._children = {name: Child(name, [sys.executable, str(CHILD)], environment) for name in formats}
        for name, child in self._children.items():
            settings = {"model": model, "device": "cpu", "dtype": BASE, "kv_cache_memory_bytes": pool}
            child.call("load", settings=settings | {"kv_cache_dtype": name})

    def measure(self, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
        """Tokens a second of all sequences together, the ratio to bfloat16, and the share of tokens that are greedily the same."""
        seconds: dict[str, list[float]] = {name: [] for name in self._children}
        outputs: dict[str, list[list[int]]] = {}
        for number in range(ROUNDS):
            order = list(self._children)
            for name in order if number % 2 == 0 else reversed(order):
                first = self._children[name].call("start_behind", prompts=prompts)["first_tokens"]
                decoded = self._children[name].call("decode", steps=DECODED)
                seconds[name].append(decoded["seconds"])
                outputs[name] = [[token, *rest] for token, rest in zip(first, decoded["token_ids"], strict=True)]
        return {
            name: {
                "tokens_per_s": round(len(prompts) * DECODED / statistics.median(seconds[name]), 1),
                "ratio": round(statistics.median(a / b for a, b in zip(seconds[BASE], seconds[name], strict=True)), 3),
                "same_greedily": round(_same_share(outputs[BASE], outputs[name]), 3),
            }
            for name in self._children
        }

    def stop(self) -> None:
        """End the child processes."""
        for child in self._children.values():
            child.stop()


def _same_share(base: list[list[int]], other: list[list[int]]) -> float:
    """The share of all tokens that stand before the first difference of their sequence."""
    same = 0
    for wanted, got in zip(base, other, strict=True):
        differs = [a != b for a, b in zip(wanted, got, strict=True)]
        same += differs.index(True) if True in differs else len(wanted)
    return same / sum(map(len, base))


def plan_figures(model: str, asked: str, context: int, memory: int) -> dict[str, float]:
    """Bytes per token, and the requests of this length that fit."""
    plan = plan_from_config(
        resolve_config(model), memory_bytes=memory, max_model_len=context, kv_cache_dtype=asked.removesuffix("-plain")
    )
    return {"bytes_per_token": plan.groups[0].bytes_per_token, "fit": plan.concurrency[-1].requests}


def main() -> None:
    """Measure and print."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", default="fp8,int8,int4,int4-plain")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 8192])
    parser.add_argument("--batches", type=numbers, default=[1, 4], help="sequences that decode at once")
    parser.add_argument("--only", choices=("quality", "speed"))
    parser.add_argument("--memory", default="1GiB", help="the KV pool of `fit`")
    parser.add_argument("--pool", default="1GiB", help="the KV pool of each engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = load_model(ModelConfig(model=options.model, device="cpu", dtype=BASE))
    tokenizer = Tokenizer.load(resolve_text_files(options.model))
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    token_ids = tokenizer.encode(text)
    formats, memory = [BASE, *options.formats.split(",")], parse_bytes(options.memory, name="--memory")
    result: dict[str, Any] = {"model": options.model, "memory": options.memory, "quality": {}, "speed": {}}

    def show(title: str, figures: dict[str, dict[str, float]]) -> None:
        for name, one in figures.items():
            print(f"{title:24s} {name:12s}", "  ".join(f"{key} {value}" for key, value in one.items()), flush=True)

    for context in options.contexts if options.only != "speed" else ():
        pieces = [token_ids[at * context : (at + 1) * context] for at in range(PIECES.get(context, 1))]
        figures = measure_quality(loaded, formats, pieces, context)
        for name in formats:
            figures[name] |= plan_figures(options.model, name, context, memory)
        show(f"{context} tokens", figures)
        result["quality"][context] = figures
    if options.only != "quality":
        engines = Engines(options.model, [name for name in formats if not name.endswith("-plain")], options.pool)
        try:
            for context in options.contexts:
                for batch in options.batches:
                    prompts = [token_ids[at * context : (at + 1) * context - ROOM] for at in range(batch)]
                    figures = engines.measure(prompts)
                    show(f"{context} tokens, {batch} at once", figures)
                    result["speed"][f"{context} x {batch}"] = figures
        finally:
            engines.stop()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
