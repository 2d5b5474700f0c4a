"""The operators of DeepSeek V4's latent attention: `latent_attention`, `pool_rows` (compressor) and `select_entries` (indexer); and
`select_rows`, the indexer of DeepSeek V3.2 and GLM-5, whose queries read rows of single tokens.

A *latent row* is one vector per token that serves as key and value of all heads (MLA with shared K and V). A *compressed entry* is
a latent row that is pooled from the (kv, gate) rows of several tokens. The *indexer* scores entries for each query, and the query
reads the best of them. Since a row serves all heads, each query gathers its rows once.

CUDA devices compute all with Triton (`gpu.py`). CPUs compute `latent_attention` and `select_rows` with compiled kernels (`cpu.py`,
`cpu_selection.py`), and the other two in torch (`reference.py`, which is also the specification and the fallback).

Legend: T queries, H heads, D latent width, W rows of the window, K entries of a query, P rows per block, B sequences, N entries of
the longest sequence, E pooled entries, R tokens per entry, G groups of R tokens that an entry reads (its own last).
"""

import torch

from transom_kernels.latent_attention.cpu import fits_cpu_kernel, latent_attention_cpu
from transom_kernels.latent_attention.cpu_selection import select_rows_cpu
from transom_kernels.latent_attention.reference import (
    LatentInputs,
    latent_attention_reference,
    pool_rows_reference,
    rows_of_sequences,
    select_entries_reference,
)
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel as fits_attention
from transom_kernels.paged_attention.inputs import PagedBatch, PagedInputs


def latent_attention(inputs: LatentInputs) -> torch.Tensor:
    """Return attention [T, H, D] of `inputs.q` over the rows at its slots of the window and of the entries.

    A score is `(q . row) * scale`. `sink_logits` add to the softmax's denominator only. A query that sees no row gets zeros.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs.check()
    if uses_triton(inputs.q) and inputs.q.stride(2) == 1:
        out: torch.Tensor = implementation("latent_attention.gpu", "latent_attention_triton")(inputs)
        return out
    if uses_cpu_kernels(inputs.q) and fits_cpu_kernel(inputs):
        return latent_attention_cpu(inputs)
    return latent_attention_reference(inputs)


def pool_rows(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Return entries [E, D] float32, pooled from the rows of `kv_cache` and `gate_cache` [ids, P, 1, G * D] at `slots` [E, G * R].

    An entry covers R tokens. With overlap it also reads the R tokens before them (G = 2 groups). Each token's kv and gate rows
    have G *series* of D channels. An entry reads series `g` of the tokens in its group `g`:

        R = 4, G = 2, entry 1 (tokens 4 to 7):   tokens 0 1 2 3  with their series 0,   tokens 4 5 6 7  with their series 1

    Each channel of an entry is the sum of the G * R kv values of this channel, weighted by softmax(gate + bias) over these rows, in
    float32. `position_bias` has one row for each place of a token in its group, [R, G * D]. Rows with a negative slot (before the
    first token) have weight zero.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    ratio, channels = position_bias.shape
    num_groups, rest = divmod(slots.shape[1], ratio)
    if rest or channels % max(1, num_groups) or kv_cache.shape[3] != channels or gate_cache.shape != kv_cache.shape:
        raise ValueError(
            f"slots {tuple(slots.shape)}, bias {tuple(position_bias.shape)} and caches {tuple(kv_cache.shape)}, "
            f"{tuple(gate_cache.shape)} do not fit: give rows in groups of the bias's length, and as many series as groups."
        )
    if any(tensor.dtype != torch.float32 for tensor in (kv_cache, gate_cache, position_bias)):
        raise ValueError("kv, gate and position bias must be float32: a compressor's state is kept exactly.")
    if uses_triton(kv_cache):
        out: torch.Tensor = implementation("latent_attention.gpu", "pool_rows_triton")(
            kv_cache, gate_cache, slots, position_bias
        )
        return out
    return pool_rows_reference(kv_cache, gate_cache, slots, position_bias)


def select_entries(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    sequence: torch.Tensor,
    num_visible: torch.Tensor,
    *,
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """Return the `top_k` best entries that each query sees: entry numbers [T, min(top_k, N)] int64, -1 where it sees fewer.

    `q` is [T, H, D], `head_weights` [T, H] float32, `key_cache` [ids, P, 1, D]. Query `t` sees the first `num_visible[t]` entries
    of sequence `sequence[t]`, whose keys are at the slots `slots[sequence[t]]` [N]. An entry's score is `sum_h head_weights[h] *
    relu(q_h . k) * scale`, in float32.

    Raises:
        ValueError: shapes do not fit.
    """
    if head_weights.shape != q.shape[:2] or key_cache.shape[2:] != (1, q.shape[2]) or len(sequence) != len(q):
        raise ValueError(
            f"q {tuple(q.shape)}, weights {tuple(head_weights.shape)}, keys {tuple(key_cache.shape)} and "
            f"{len(sequence)} sequence numbers do not fit: give one head of keys, and a weight per query head."
        )
    if uses_triton(q) and q.stride(2) == 1:
        out: torch.Tensor = implementation("latent_attention.gpu", "select_entries_triton")(
            q, head_weights, key_cache, slots, sequence, num_visible, top_k=top_k, scale=scale
        )
        return out
    return select_entries_reference(q, head_weights, key_cache, slots, sequence, num_visible, top_k=top_k, scale=scale)


def select_rows(
    q: torch.Tensor, head_weights: torch.Tensor, key_cache: torch.Tensor, batch: PagedBatch, *, top_k: int
) -> torch.Tensor:
    """Return the slots of the `top_k` best rows that each query sees: [T, min(top_k, N)] int64, in the order of positions, and
    -1 after them. N is how many rows the block table has room for.

    `q` is [T, H, D], `head_weights` [T, H] in its dtype, `key_cache` [ids, P, 1, D] has a key for each token. A query sees its
    sequence up to itself; the batch has neither windows nor lower bounds. A row's score is `sum_h head_weights[h] * relu(q_h . k)`,
    in float32. So a query that sees no more than `top_k` rows reads all of them, whatever else is in the batch.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs = PagedInputs(q=q, k_cache=key_cache, v_cache=key_cache, batch=batch, scale=1.0)
    if head_weights.shape != q.shape[:2] or key_cache.shape[2] != 1 or head_weights.dtype != q.dtype:
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype}, weights {tuple(head_weights.shape)} {head_weights.dtype} and keys "
            f"{tuple(key_cache.shape)} do not fit: give one head of keys, and a weight per query head in q's dtype."
        )
    inputs.check()
    if uses_cpu_kernels(q) and fits_attention(inputs) and head_weights.stride(1) == 1:
        return select_rows_cpu(q, head_weights, key_cache, batch, top_k=top_k)
    slots, sequence, num_visible = rows_of_sequences(batch, len(q))
    num_rows = slots.shape[1]
    if num_rows <= top_k:
        chosen = torch.arange(num_rows, device=q.device).expand(len(q), -1)
    else:
        weights = head_weights.float()
        best = select_entries(q, weights, key_cache, slots, sequence, num_visible, top_k=top_k, scale=1.0)
        chosen = best.masked_fill_(best < 0, num_rows).sort(dim=1).values
    is_seen = chosen < num_visible[:, None]
    return slots[sequence[:, None], chosen.clamp(max=num_rows - 1)].masked_fill_(~is_seen, -1)
