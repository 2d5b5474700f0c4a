"""A small decoder that really reads its paged caches through the block tables, and the same decoder without pages.

It is strict: a key that attention needs but no table column holds is an error, never a guess.
"""

from __future__ import annotations

import math

import torch

from transom_core.model_config.architecture import Architecture, LayerAttention
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.layers.policy_rows import MixedBatch
from transom_worker.models.model import Model

VOCABULARY = 64
HIDDEN = 32
HEAD = 8
KV_HEADS = 2


def architecture(layers: list[LayerAttention], max_position: int = 512) -> Architecture:
    return Architecture(
        family="toy",
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        vocab_size=VOCABULARY,
        max_position=max_position,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        checkpoint_dtype="float32",
        layers=tuple(layers),
    )


def layer(window: int | None = None, sinks: int = 0) -> LayerAttention:
    return LayerAttention(num_heads=KV_HEADS, num_kv_heads=KV_HEADS, head_size=HEAD, window=window, sinks=sinks)


def load_toy(layers: list[LayerAttention], *, eos: tuple[int, ...] = (), max_position: int = 512) -> LoadedModel:
    shape = architecture(layers, max_position)
    return LoadedModel(
        model=ToyDecoder(shape), architecture=shape, dtype="float32", device=torch.device("cpu"), eos_token_ids=eos
    )


class ToyDecoder(Model):
    weight_bytes = 1000
    vocab = slice(0, VOCABULARY)

    def __init__(self, shape: Architecture) -> None:
        generator = torch.Generator().manual_seed(11)

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator) / math.sqrt(size[-1])

        self.architecture = shape
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.qkv = [weight(3 * KV_HEADS * HEAD, HIDDEN) * 1.5 for _ in shape.layers]
        self.output = [weight(HIDDEN, KV_HEADS * HEAD) * 2.0 for _ in shape.layers]
        self.head = weight(VOCABULARY, HIDDEN) * 4.0
        self.num_forwards = 0
        self.most_logit_rows = 0  # of one call

    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        self.most_logit_rows = max(self.most_logit_rows, len(hidden_RN))
        return hidden_RN @ self.head.T

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        self.num_forwards += 1
        x = self._embed(batch.token_ids, batch.positions)
        for index, spec in enumerate(self.architecture.layers):
            group = batch.groups[batch.group_of_layer[index]]
            cache = batch.caches[index]
            q, k, v = self._qkv(index, x)
            cache.k[group.slots // group.block_size, group.slots % group.block_size] = k
            cache.v[group.slots // group.block_size, group.slots % group.block_size] = v
            rows = []
            for b, (start, count) in enumerate(zip(group.start_host, group.count_host, strict=True)):
                first = int(group.query_offset[b])
                for position in range(start, start + count):
                    visible = _visible(spec, position, group.attend_from_host[b])
                    keys, values = _read(group, cache, b, visible)
                    rows.append(_attend(q[first + position - start], keys, values))
            if isinstance(group, MixedBatch):  # of a warm-up: this model's rows with KV policies read nothing
                assert not rows
                continue
            x = x + torch.stack(rows) @ self.output[index].T
        return x[batch.logit_rows]

    def reference(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of every position, without a cache."""
        x = self._embed(torch.tensor(token_ids), torch.arange(len(token_ids)))
        for index, spec in enumerate(self.architecture.layers):
            q, k, v = self._qkv(index, x)
            rows = []
            for position in range(len(token_ids)):
                visible = _visible(spec, position, 0)
                rows.append(_attend(q[position], k[visible], v[visible]))
            x = x + torch.stack(rows) @ self.output[index].T
        return x @ self.head.T

    def continue_greedily(self, token_ids: list[int], count: int) -> list[int]:
        known = list(token_ids)
        for _ in range(count):
            known.append(int(self.reference(known)[-1].argmax()))
        return known[len(token_ids) :]

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() / 10.0 ** torch.linspace(0, 2, HIDDEN // 2)
        return self.embedding[token_ids] + torch.cat([angles.sin(), angles.cos()], -1)

    def _qkv(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
        return (normed @ self.qkv[index].T).view(len(x), 3, KV_HEADS, HEAD).unbind(1)


def _visible(spec: LayerAttention, position: int, attend_from: int) -> list[int]:
    low = 0 if spec.window is None else max(0, position - spec.window + 1)
    sinks = range(min(spec.sinks, low))
    return [p for p in (*sinks, *range(low, position + 1)) if p >= attend_from]


def _read(group: PagedBatch, cache: LayerCache, b: int, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    table = group.block_table_host[b]
    assert table == group.block_table[b].tolist()
    blocks = []
    for position in positions:
        logical = position // group.block_size
        column = logical
        if logical >= group.num_sink_blocks:
            assert logical >= group.first_block_host[b], f"block {logical} was dropped"
            column = logical - group.first_block_host[b] + group.num_sink_blocks
        assert table[column] >= 0, f"position {position} has no block"
        blocks.append(table[column])
    offsets = torch.tensor([position % group.block_size for position in positions])
    index = torch.tensor(blocks)
    return cache.k[index, offsets], cache.v[index, offsets]


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q [H, D], keys and values [N, H, D]."""
    weights = (torch.einsum("hd,nhd->hn", q, keys) / math.sqrt(HEAD)).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values).reshape(-1)
