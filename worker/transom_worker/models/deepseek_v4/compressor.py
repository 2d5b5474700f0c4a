"""DeepSeek V4's compressor, which pools tokens' (kv, gate) rows into compressed entries, and its indexer, which selects entries.

A *latent row* is one vector per token that is key and value of all heads. A *compressed entry* is a latent row that stands for R
tokens. A token *closes* an entry if it is the last of the entry's R tokens. The compressor's *state* is a cache of the (kv, gate)
rows of recent tokens, in float32.

Legend: T tokens, N hidden width, R tokens per entry, G groups of R tokens that an entry reads, D width of an entry,
E entries that a step closes, Q query rank, H indexer heads, K entries chosen, B sequences.
"""

from dataclasses import dataclass, replace

import torch

from transom_core.model_config.deepseek_v4 import DeepseekV4Shape
from transom_core.model_config.layer_attention import Compression
from transom_kernels.kv_write import Preparation, QkvInputs, kv_write, prepare_qkv
from transom_kernels.latent_attention import pool_rows, select_entries
from transom_kernels.rotary import rotary_
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.layers.forward_batch import CompressedCache, LayerCache
from transom_worker.models.layers.norm import RmsNorm
from transom_worker.models.layers.rotary_embedding import RotaryTables
from transom_worker.models.loading import Loader


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySizes:
    """The hidden width from which entries are made, the entries' own width, and their norm's epsilon."""

    hidden: int
    width: int
    eps: float


class Compressor:
    """Writes every token's (kv, gate) row to the state, and pools rows into the entries that a step closes.

    The cache keeps the state row of each token at the token's position. So an entry's value does not depend on where steps, chunks
    of a prefill or prefix cache hits begin.
    """

    def __init__(self, load: Loader, compression: Compression, sizes: EntrySizes) -> None:
        self._ratio, self._num_groups = compression.ratio, 1 + compression.overlap
        channels = self._num_groups * sizes.width
        self._kv_gate = load.linear("wkv", "wgate", shapes=[(channels, sizes.hidden)] * 2)
        self._position_bias = load.tensor("ape", torch.float32, shape=(self._ratio, channels))
        self._norm = RmsNorm(load.tensor("norm.weight", torch.float32, shape=(sizes.width,)), sizes.eps)
        parts = (self._kv_gate, self._norm)
        self.weight_bytes = self._position_bias.nbytes + sum(part.weight_bytes for part in parts)

    def __call__(self, x_TN: torch.Tensor, cache: CompressedCache, metadata: AttentionMetadata) -> None:
        """Write this step's (kv, gate) rows to the state, and make the entries that the step closes."""
        kv_gate = self._kv_gate(x_TN).float().view(len(x_TN), 2, 1, -1)
        state, group = cache.state.cache, metadata.batch.groups[cache.state.group]
        kv_write(kv_gate[:, 0], kv_gate[:, 1], state.k, state.v, group.slots)
        if not metadata.closes_entries(cache):
            return
        slots = metadata.state(cache, self._ratio, self._num_groups)
        pooled_ED = pool_rows(state.k, state.v, slots, self._position_bias)
        tables, slots_E = metadata.entry_tables(cache, self._ratio), metadata.batch.groups[cache.entries.group].slots
        write_rotated(pooled_ED, self._norm, tables, cache.entries.cache, slots_E)


class Indexer:
    """The indexer: a compressor that writes one key per entry, and queries that select the entries to attend to."""

    def __init__(self, load: Loader, compression: Compression, sizes: EntrySizes, shape: DeepseekV4Shape) -> None:
        width, heads = compression.index_size, shape.num_index_heads
        self._compressor = Compressor(load.under("compressor."), compression, replace(sizes, width=width))
        self._queries = load.linear("wq_b", shapes=[(heads * width, shape.query_rank)])
        self._weights = load.linear("weights_proj", shapes=[(heads, sizes.hidden)])
        self._ratio, self._num_heads, self._top_k = compression.ratio, heads, shape.index_top_k
        self._scale = float((width * heads) ** -0.5)
        parts = (self._compressor, self._queries, self._weights)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def write(self, x_TN: torch.Tensor, cache: CompressedCache, metadata: AttentionMetadata) -> None:
        """Write this step's state, and the keys of the entries that it closes."""
        self._compressor(x_TN, cache, metadata)

    def choose(
        self,
        x_TN: torch.Tensor,
        query_TQ: torch.Tensor,
        tables: RotaryTables,
        cache: CompressedCache,
        metadata: AttentionMetadata,
        slots_BN: torch.Tensor,
    ) -> torch.Tensor:
        """Return the slots of the entries that each query reads, [T, K], out of its sequence's entries `slots_BN`; -1 for none."""
        q_THD = self._queries(query_TQ).view(len(x_TN), self._num_heads, -1)
        rotate(q_THD, tables)
        chosen_TK = select_entries(
            q_THD,
            self._weights(x_TN).float(),
            cache.entries.cache.k,
            metadata.entries(cache.entries.group, self._ratio),
            metadata.sequence_T,
            metadata.num_visible(self._ratio),
            top_k=self._top_k,
            scale=self._scale,
        )
        slots_TK = slots_BN[metadata.sequence_T[:, None], chosen_TK.clamp(min=0)]
        return slots_TK.masked_fill_(chosen_TK < 0, -1)

    def reads_all(self, metadata: AttentionMetadata) -> bool:
        """Return whether no sequence has more than `top_k` entries, so that nothing needs to be selected."""
        return metadata.num_entries(self._ratio) <= self._top_k


def write_rotated(
    rows_TD: torch.Tensor,
    norm: RmsNorm,
    tables: RotaryTables,
    cache: LayerCache,
    slots_T: torch.Tensor,
    q_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows, rotate their last elements and write them to the cache, in one kernel launch.

    The same launch normalises `q_THD`, if given, without a weight, rotates it and returns it.
    """
    preparation = Preparation(
        norm=True, k_weight=norm.weight_N[None], eps=norm.eps, interleaved=tables.interleaved, rotates_last=True
    )
    k_T1D = rows_TD[:, None]
    q_THD = k_T1D[:, :0] if q_THD is None else q_THD
    cos_sin = (tables.cos, tables.signed_sin)
    return prepare_qkv(
        QkvInputs(q=q_THD, k=k_T1D, k_cache=cache.k, slots=slots_T, tables=cos_sin, preparation=preparation)
    )


def rotate(x_THD: torch.Tensor, tables: RotaryTables) -> None:
    """Rotate the last elements of every head, in place."""
    width = tables.cos.shape[-1]
    rotary_(x_THD[..., x_THD.shape[-1] - width :], tables.cos, tables.signed_sin, interleaved=tables.interleaved)
