"""DeepSeek V4's attention: a window of latent rows and compressed entries under one softmax.

A *latent row* is one vector per token that is key and value of all heads. A *compressed entry* is a latent row that stands for R
tokens. A token *closes* an entry if it is the last of the entry's R tokens.

Legend: T tokens, N hidden width, Q query rank, H heads, D latent width, G groups of heads, R output rank;
heads and groups are those of this rank.
"""

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_core.model_config.sharding import head_share
from transom_kernels.latent_attention import LatentInputs, latent_attention
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.deepseek_v4.compressor import Compressor, EntrySizes, Indexer, rotate, write_rotated
from transom_worker.models.layers.forward_batch import CompressedCache, LayerCache
from transom_worker.models.layers.rotary_embedding import RotaryTables
from transom_worker.models.loading import Loader


class LatentAttention:
    """Low-rank queries, one softmax over a window of latent rows and entries, and an output projection by groups of heads.

    A latent row is key and value at once, and keys must be rotated, so the values that attention sums are rotated too. The output
    is therefore rotated back by the query's position, which leaves each value rotated by its distance from the query.
    """

    def __init__(self, load: Loader, architecture: Architecture, shape: DeepseekV4Shape, index: int) -> None:
        """Load layer `index`; `load` reads names within `attn`.

        The groups of heads are divided among the ranks; every rank has all the other weights.
        """
        layer = architecture.layers[index]
        heads = head_share(architecture, index, load.parallel.rank, load.parallel.size).queries
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        width, rank, groups = layer.num_heads * layer.head_size, shape.query_rank, shape.output_groups
        self._layer, self._num_heads = layer, heads.stop - heads.start
        self._scale = float(layer.head_size**-0.5)
        self._query_rank = rank
        self._down = load.linear("wq_a", "wkv", shapes=[(rank, hidden), (layer.head_size, hidden)])
        self._query_norm = load.norm("q_norm", eps, size=rank)
        self._latent_norm = load.norm("norm", eps, size=layer.head_size)
        rows = slice(heads.start * layer.head_size, heads.stop * layer.head_size)
        self._queries = load.linear("wq_b", shapes=[(width, rank)], rows=[rows])
        heads_each, low = layer.num_heads // groups, groups * shape.output_rank
        own = slice(*(edge // heads_each * shape.output_rank for edge in (heads.start, heads.stop)))
        output = load.tensor("wo_a.weight", shape=(low, width // groups), part=(own,))
        self._output_GRD = output.view(-1, shape.output_rank, width // groups)
        self._output = load.row_parallel("wo_b", shape=(hidden, low), columns=own)
        self._sinks_H = load.tensor("attn_sink", torch.float32, shape=(layer.num_heads,), part=(heads,))
        self._compressor, self._indexer = None, None
        if layer.compression is not None:
            sizes = EntrySizes(hidden=hidden, width=layer.head_size, eps=eps)
            self._compressor = Compressor(load.under("compressor."), layer.compression, sizes)
            if layer.compression.index_size:
                self._indexer = Indexer(load.under("indexer."), layer.compression, sizes, shape)
        parts = (
            *(self._down, self._query_norm, self._latent_norm, self._queries, self._output),
            *(self._compressor, self._indexer),
        )
        tensors = self._output_GRD.nbytes + self._sinks_H.nbytes
        self.weight_bytes = tensors + sum(part.weight_bytes for part in parts if part is not None)

    def __call__(
        self,
        x_TN: torch.Tensor,
        tables: RotaryTables,
        cache: LayerCache,
        group: int,
        compressed: CompressedCache | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the output [T, N]; write latent rows and the entries that the step closes. `group` is `cache`'s KV cache group."""
        down_T = self._down(x_TN)
        query_TQ = self._query_norm(down_T[:, : self._query_rank])
        q_THD = self._queries(query_TQ).view(len(x_TN), self._num_heads, -1)
        slots_T = metadata.batch.groups[group].slots
        q_THD = write_rotated(down_T[:, self._query_rank :], self._latent_norm, tables, cache, slots_T, q_THD)
        assert self._layer.window is not None
        inputs = LatentInputs(
            q=q_THD,
            window_cache=cache.k,
            window_slots=metadata.window(group, self._layer.window),
            entry_cache=None if compressed is None else compressed.entries.cache.k,
            entry_slots=None if compressed is None else self._entries(x_TN, query_TQ, tables, compressed, metadata),
            sink_logits=self._sinks_H,
            scale=self._scale,
            counts=metadata.batch.groups[group].count_host,
        )
        y_THD = latent_attention(inputs)
        rotate(y_THD, RotaryTables(tables.cos, -tables.signed_sin, tables.interleaved))
        return self._project(y_THD)

    def _entries(
        self,
        x_TN: torch.Tensor,
        query_TQ: torch.Tensor,
        tables: RotaryTables,
        cache: CompressedCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write the entries that this step closes, and return the slots of the entries that each query reads."""
        assert self._compressor is not None
        assert self._layer.compression is not None
        ratio, group = self._layer.compression.ratio, cache.entries.group
        self._compressor(x_TN, cache, metadata)
        if self._indexer is None or cache.index is None:
            return metadata.visible_entries(group, ratio)
        self._indexer.write(x_TN, cache.index, metadata)
        if self._indexer.reads_all(metadata):
            return metadata.visible_entries(group, ratio)
        return self._indexer.choose(x_TN, query_TQ, tables, cache.index, metadata, metadata.entries(group, ratio))

    def _project(self, y_THD: torch.Tensor) -> torch.Tensor:
        """Project each group of heads to a low rank, and all groups together to the hidden width."""
        y_GTD = y_THD.reshape(len(y_THD), len(self._output_GRD), -1).transpose(0, 1)
        low_GTR = torch.bmm(y_GTD, self._output_GRD.transpose(1, 2))
        return self._output(low_GTR.transpose(0, 1).flatten(1))
