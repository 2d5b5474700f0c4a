"""Multi-head latent attention (MLA) of DeepSeek V2 to V3.2, Kimi, GLM-4.7-Flash, GLM-5, Youtu and Ling 3.

A token's cache row is [latent, rotated key], which all heads share. A head's key is [up_k latent, rotated key] and its value is
up_v latent. A decode step computes neither, since both matrices can be *absorbed* into what it multiplies besides:

    q . key = plain_q . (up_k latent) + rotated_q . rotated_key = (up_k^T plain_q) . latent + rotated_q . rotated_key
    sum of weight * value = up_v (sum of weight * latent)

So attention runs as with one KV head whose keys are rows and whose values are the rows' latent parts. Kernels hold the sums of all
query heads of a KV head at once, so at most MOST_HEADS of them share a KV head; several KV heads are then views of the same rows.
Every rank has all rows, and its own heads. Prompts compute keys and values where that costs less (`expanded_prompts`).

In DeepSeek V3.2 and GLM-5 a query reads the rows that an *indexer* selects (`RowSelector`): those of the largest scores, which
small heads compute from a key of each token. The key lies beside the token's row, as the value of the layer's cache. The published
code multiplies queries and keys by a Hadamard matrix and rounds them to fp8; as in transformers, neither is done here.

Sources: the papers of DeepSeek V2 to V3.2, and `models/deepseek_v3`, `deepseek_v32` and `glm_moe_dsa` of transformers.

Legend: T tokens, N hidden width, H heads of this rank, Q rank of queries, L latent width, P plain and R rotated width of a head,
S = P + R, V value width, C tokens of expanded blocks, W = L + R, I heads and X width of the indexer, K rows that a query reads.
"""

from dataclasses import replace

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mla import LATENT_NORM_EPS, Indexer, Mla
from transom_core.model_config.sharding import head_share
from transom_kernels.kv_write import Preparation, QkvInputs, prepare_qkv
from transom_kernels.latent_attention import LatentInputs, latent_attention, select_rows
from transom_kernels.linear_recurrence import gated_rms_norm
from transom_kernels.paged_attention import MaskRule, PagedInputs, paged_attention
from transom_kernels.paged_attention.inputs import CAUSAL, PagedBatch
from transom_worker.models.expanded_prompts import Piece, heads_at_once, pieces_of
from transom_worker.models.layers.attention import LayerContext, TokenMixer
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.linear import HeadsLinear
from transom_worker.models.layers.norm import LayerNorm, RmsNorm
from transom_worker.models.layers.rotary_embedding import RotaryTables
from transom_worker.models.loading import Loader

MOST_HEADS = (
    16  # 16 sums of 512 numbers, with as many queries, fill the registers and shared memory of a multiprocessor
)
_SELECTED = "rows that queries read"  # in a batch's scratch


class RowSelector:
    """The indexer of a layer: it writes a key for each token, and selects the rows that queries read."""

    def __init__(self, indexer: Indexer, mla: Mla, hidden: int, load: Loader) -> None:
        heads, size = indexer.num_heads, indexer.size
        self._queries = load.linear("wq_b", shapes=[(heads * size, mla.query_rank)])
        self._keys = load.linear("wk", "weights_proj", shapes=[(size, hidden), (heads, hidden)])
        weight, bias = (load.tensor(f"k_norm.{name}", shape=(size,)) for name in ("weight", "bias"))
        self._norm = LayerNorm(weight, LATENT_NORM_EPS, bias)
        self._indexer, self._preparation = indexer, Preparation(interleaved=indexer.interleaved)
        self.weight_bytes = sum(part.weight_bytes for part in (self._queries, self._keys, self._norm))

    def __call__(
        self, x_TN: torch.Tensor, query_TQ: torch.Tensor, tables: RotaryTables, keys: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Write this step's keys to the cache `keys`; return the slots of the rows that each query reads, [T, K], -1 for none."""
        size, tables = self._indexer.size, tables.for_index or tables
        projected = self._keys(x_TN)
        prepared = QkvInputs(
            q=self._queries(query_TQ).view(len(x_TN), self._indexer.num_heads, size),
            k=self._norm(projected[:, :size])[:, None],
            k_cache=keys,
            slots=batch.slots,
            tables=(tables.cos, tables.signed_sin),
            preparation=self._preparation,
        )
        return select_rows(prepare_qkv(prepared), projected[:, size:], keys, batch, top_k=self._indexer.top_k)


class MlaAttention(TokenMixer):
    """Low-rank queries, latent rows in the cache, and a matrix for each head before and after attention."""

    def __init__(self, architecture: Architecture, mla: Mla, index: int, load: Loader) -> None:
        """Load layer `index`; `load` reads names within `self_attn`. Heads are divided among the ranks, all else is whole."""
        layer, hidden, bias = architecture.layers[index], architecture.hidden_size, architecture.attention_bias
        heads = head_share(architecture, index, load.parallel.rank, load.parallel.size).queries
        columns = slice(heads.start * mla.value_size, heads.stop * mla.value_size)
        shape = (hidden, layer.num_heads * mla.value_size)
        super().__init__(load.row_parallel("o_proj", shape=shape, columns=columns, bias=architecture.output_bias))
        size = mla.plain_size + mla.rope_size
        rows = [slice(heads.start * size, heads.stop * size)]
        row = (layer.head_size, hidden)
        self._query_norm: RmsNorm | None = None
        if mla.query_rank:
            names, shapes = ("q_a_proj", "kv_a_proj_with_mqa"), [(mla.query_rank, hidden), row]
            self._down = load.linear(*names, shapes=shapes, bias=bias)
            self._query_norm = load.norm("q_a_layernorm", LATENT_NORM_EPS, size=mla.query_rank)
            self._queries = load.linear("q_b_proj", shapes=[(layer.num_heads * size, mla.query_rank)], rows=rows)
        else:
            self._down = load.linear("kv_a_proj_with_mqa", shapes=[row], bias=bias)
            self._queries = load.linear("q_proj", shapes=[(layer.num_heads * size, hidden)], rows=rows)
        self._latent_norm = load.norm("kv_a_layernorm", LATENT_NORM_EPS, size=mla.latent_rank)
        self._absorb, keys, self._expand = _matrices(mla, layer.num_heads, heads, load)
        self._keys = keys if mla.indexer is None else None
        self._mla, self._num_heads = mla, heads.stop - heads.start
        self._gate = (
            load.linear("g_proj", shapes=[(layer.num_heads, hidden)], rows=[heads]) if mla.gates_heads else None
        )
        self._most_heads = head_share(
            architecture, index, 0, load.parallel.size
        ).num_queries  # the first ranks have most
        self._kv_heads = _kv_heads(self._num_heads)
        self._rule = MaskRule(window=layer.window, num_sink_tokens=layer.sinks, chunk=layer.chunk)
        self._selector, self._no_sinks_H = None, None
        if mla.indexer is not None:
            self._no_sinks_H = torch.full((self._num_heads,), float("-inf"), device=load.device)
            if index in mla.indexer.layers:
                self._selector = RowSelector(mla.indexer, mla, hidden, load.under("indexer."))
        matrices = (self._down, self._queries, self._absorb, self._keys, self._expand, self._gate)
        parts = (*matrices, self._query_norm, self._latent_norm, self._selector)
        self.weight_bytes = self._output.weight_bytes + sum(part.weight_bytes for part in parts if part is not None)

    def _mix(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the outputs of all heads, concatenated, [T, H * V]; write this step's rows to the cache."""
        out_TN = self._attend(x_TN, context)
        if self._gate is None:
            return out_TN
        return gated_rms_norm(out_TN, self._gate(x_TN), None, 0.0, group=self._mla.value_size, by_sigmoid=True)

    def _attend(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Return the outputs of all heads before their gates, [T, H * V]; write this step's rows to the cache."""
        q_THS, cache, batch = self._prepare(x_TN, context), context.cache, context.batch
        if self._no_sinks_H is not None:
            rows = LatentInputs(
                q=self._absorb(q_THS),
                window_cache=cache.k,
                window_slots=batch.scratch[_SELECTED],
                sink_logits=self._no_sinks_H,
                scale=self._mla.scale,
                counts=batch.count_host,
            )
            return self._expand(latent_attention(rows)[..., : self._mla.latent_rank]).flatten(1)
        is_whole = self._rule == CAUSAL  # tables of windows lack blocks, and their prompts see few keys
        pieces = pieces_of(batch, self._mla, self._token_bytes(q_THS.itemsize)) if is_whole else ()
        if not pieces:
            return self._attend_absorbed(q_THS, cache, batch).flatten(1)
        out_THV = q_THS.new_empty(*q_THS.shape[:2], self._mla.value_size)
        for piece in pieces:
            self._attend_piece(q_THS[piece.rows], cache, piece, out_THV[piece.rows])
        return out_THV.flatten(1)

    def _attend_absorbed(self, q_THS: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> torch.Tensor:
        """Return the outputs of all heads, [T, H, V], by attention over latent rows."""
        inputs = PagedInputs(
            q=self._absorb(q_THS),
            k_cache=cache.k.expand(-1, -1, self._kv_heads, -1),
            v_cache=cache.k[..., : self._mla.latent_rank].expand(-1, -1, self._kv_heads, -1),
            batch=batch,
            scale=self._mla.scale,
            rule=self._rule,
            most_kv_heads=_kv_heads(self._most_heads),
        )
        return self._expand(paged_attention(inputs))

    def _attend_piece(self, q_THS: torch.Tensor, cache: LayerCache, piece: Piece, out_THV: torch.Tensor) -> None:
        """Write the outputs of all heads to `out_THV`; expand keys and values, if the piece says so, of a few heads at a time."""
        if piece.blocks is None:
            out_THV.copy_(self._attend_absorbed(q_THS, cache, piece.batch))
            return
        assert self._keys is not None
        rank, block_size = self._mla.latent_rank, piece.batch.block_size
        rows_C1W = cache.k.index_select(0, piece.blocks).flatten(0, 1)
        at_once = heads_at_once(self._num_heads, len(rows_C1W), self._token_bytes(q_THS.itemsize))
        for begin in range(0, self._num_heads, at_once):
            heads = slice(begin, min(begin + at_once, self._num_heads))
            rows_CHW = rows_C1W.expand(-1, heads.stop - begin, -1)
            latents_CHL = rows_CHW[..., :rank]
            keys_CHS = torch.cat([self._keys(latents_CHL, heads), rows_CHW[..., rank:]], dim=2)
            values_CHV = self._expand(latents_CHL, heads)
            inputs = PagedInputs(
                q=q_THS[:, heads],
                k_cache=keys_CHS.view(-1, block_size, *keys_CHS.shape[1:]),
                v_cache=values_CHV.view(-1, block_size, *values_CHV.shape[1:]),
                batch=piece.batch,
                scale=self._mla.scale,
                rule=self._rule,
                most_kv_heads=self._most_heads,
            )
            out_THV[:, heads] = paged_attention(inputs)

    def _token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's keys and values of this rank's heads."""
        return int(self._num_heads * (self._mla.plain_size + self._mla.rope_size + self._mla.value_size) * itemsize)

    def _prepare(self, x_TN: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Write this step's rows to the cache; return the rotated queries, [T, H, S] with S = P + R.

        If the layer has an indexer, also select the rows that queries read, for this layer and later ones without an indexer.
        """
        tables, cache, batch, query_scale_T11 = context
        mla, down_T = self._mla, self._down(x_TN)
        query_TQ = x_TN if self._query_norm is None else self._query_norm(down_T[:, : mla.query_rank])
        latent_TL = self._latent_norm(down_T[:, mla.query_rank : mla.query_rank + mla.latent_rank])
        rotated_T1R = down_T[:, None, mla.query_rank + mla.latent_rank :]
        cos_sin = None if tables is None else (tables.cos, tables.signed_sin)
        how = Preparation(interleaved=tables is not None and tables.interleaved)
        # The operator rotates what it writes as keys and not what it writes as values: here the row's two parts.
        row = QkvInputs(
            q=rotated_T1R[:, :0],
            k=rotated_T1R,
            v=latent_TL[:, None],
            slots=batch.slots,
            tables=cos_sin,
            preparation=how,
            k_cache=cache.k[..., mla.latent_rank :],
            v_cache=cache.k[..., : mla.latent_rank],
        )
        prepare_qkv(row)
        if self._selector is not None and tables is not None:
            batch.scratch[_SELECTED] = self._selector(x_TN, query_TQ, tables, cache.v, batch)
        projected = self._queries(query_TQ)
        queries = QkvInputs(
            q=projected.view(len(x_TN), self._num_heads, projected.shape[1] // self._num_heads),
            slots=batch.slots,
            tables=cos_sin,
            preparation=replace(how, rotates_last=True),
            query_scale=None if query_scale_T11 is None else query_scale_T11.flatten(),
        )
        return prepare_qkv(queries)


def _kv_heads(num_heads: int) -> int:
    """Return the least number of KV heads that divides `num_heads` query heads and gives none of them more than MOST_HEADS."""
    return next(count for count in range(-(-num_heads // MOST_HEADS), num_heads + 1) if num_heads % count == 0)


def _matrices(mla: Mla, num_heads: int, heads: slice, load: Loader) -> tuple[HeadsLinear, HeadsLinear, HeadsLinear]:
    """Load the matrices of this rank's heads: of a query [plain, rotated] to [L + R], of a latent to a key's plain part [P], and of
    a latent, or a sum of latents, to a value [V].

    The first holds up_k^T and, for the rotated part, which stays as it is, a unit matrix.
    """
    size, rank = mla.plain_size + mla.value_size, mla.latent_rank
    rows, shape = slice(heads.start * size, heads.stop * size), (num_heads * size, rank)
    up_HSL = load.tensor("kv_b_proj.weight", shape=shape, part=(rows,)).view(-1, size, rank)
    absorb = up_HSL.new_zeros(len(up_HSL), rank + mla.rope_size, mla.plain_size + mla.rope_size)
    absorb[:, :rank, : mla.plain_size] = up_HSL[:, : mla.plain_size].transpose(1, 2)
    absorb[:, rank:, mla.plain_size :] = torch.eye(mla.rope_size, dtype=absorb.dtype, device=absorb.device)
    keys = HeadsLinear(absorb[:, :rank, : mla.plain_size].transpose(1, 2), is_anothers=True)
    return HeadsLinear(absorb), keys, HeadsLinear(up_HSL[:, mla.plain_size :].contiguous())
