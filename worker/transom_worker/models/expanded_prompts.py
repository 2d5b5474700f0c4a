"""Chooses the prompts of a step whose latent rows are *expanded* into keys and values of all heads before attention.

With L numbers of a latent and R rotated ones, P plain numbers of a key and V of a value, a head multiplies

    absorbed   2 L + R    numbers for a query and a key that it sees, and   L (P + V)   for a query, which passes both matrices
    expanded   P + R + V  numbers for a query and a key that it sees, and   L (P + V)   for a key of the sequence, cached or new

DeepSeek V3: 1,088 against 320 for a query and a key, and 131,072 for a row of the matrices. So a whole prompt is expanded, and a
prompt after a long cached prefix from 171 new tokens on. The choice depends on the sequence's cached tokens and its new ones in the
step.

Legend: B sequences, n blocks, N block table columns.
"""

from dataclasses import dataclass

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mla import Mla
from transom_kernels.paged_attention.inputs import PagedBatch

LEAST_TOKENS = 16  # shorter prompts have too few rows for a tile of attention
MOST_BYTES = 128 << 20  # keys and values that are expanded at once; one head of one sequence may take more
_PIECES = "pieces of latent attention"  # in a batch's scratch


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring sequences of a step whose attention is computed at once, absorbed or expanded."""

    rows: slice  # of the step's tokens
    batch: PagedBatch  # block tables of the cache; of an expanded piece, those of the expanded blocks
    blocks: torch.Tensor | None  # [n] ids of the cache's blocks to expand, in the order of `batch`; None: absorbed


def is_expanded(mla: Mla, start: int, count: int) -> bool:
    """Return whether `count` new tokens after `start` others cost less by expanded keys and values."""
    if count < LEAST_TOKENS or mla.indexer is not None:
        return False
    seen = count * start + count * (count + 1) // 2  # pairs of a query and a key
    matrices = mla.latent_rank * (mla.plain_size + mla.value_size)
    absorbed = seen * (2 * mla.latent_rank + mla.rope_size) + count * matrices
    expanded = seen * (mla.plain_size + mla.rope_size + mla.value_size) + (start + count) * matrices
    return expanded < absorbed


def may_expand(architecture: Architecture) -> bool:
    """Return whether a layer of the model expands prompts: layers with a window do not, since their queries see few keys."""
    mla, layers = architecture.mla, architecture.layers
    has_whole = any(layer.latent and layer.window is None and layer.chunk is None for layer in layers)
    return mla is not None and mla.indexer is None and has_whole


def expanded_bytes(architecture: Architecture, num_heads: int, max_model_len: int, itemsize: int) -> int:
    """Return the bytes that expanding takes at once: gathered rows of the longest sequence, and keys and values, parts of which are
    there twice while they are computed. A rank has `num_heads` heads."""
    mla = architecture.mla
    if mla is None or not may_expand(architecture):
        return 0
    head = max_model_len * (mla.plain_size + mla.rope_size + mla.value_size) * itemsize
    rows = max_model_len * (mla.latent_rank + mla.rope_size) * itemsize
    return rows + 2 * min(num_heads * head, max(head, MOST_BYTES))


def pieces_of(batch: PagedBatch, mla: Mla, token_bytes: int) -> tuple[Piece, ...]:
    """Cut a step into pieces; return none if it has no prompt to expand. The first layer cuts, and the batch keeps the pieces.

    `token_bytes` are those of one token's keys and values of all heads.
    """
    if _PIECES not in batch.scratch:
        batch.scratch[_PIECES] = tuple(_cut(batch, mla, token_bytes))
    pieces: tuple[Piece, ...] = batch.scratch[_PIECES]
    return pieces


def heads_at_once(num_heads: int, num_tokens: int, token_bytes: int) -> int:
    """Return how many heads' keys and values of `num_tokens` tokens are expanded at once, so that all turns have about as many."""
    turns = min(num_heads, -(-num_tokens * token_bytes // MOST_BYTES))
    return -(-num_heads // max(1, turns))


def _cut(batch: PagedBatch, mla: Mla, token_bytes: int) -> list[Piece]:
    # Recordings have no counts on the host; they compute no prompt that is expanded.
    ends = [start + count for start, count in zip(batch.start_host, batch.count_host, strict=True)]
    kinds = [is_expanded(mla, end - count, count) for end, count in zip(ends, batch.count_host, strict=True)]
    if not any(kinds):
        return []
    edges, keys = [0], 0  # the first sequences of pieces
    for b, end in enumerate(ends):
        keys += end
        if b and (kinds[b] != kinds[b - 1] or (kinds[b] and keys * token_bytes > MOST_BYTES)):
            edges.append(b)
            keys = end
    rows, pieces = [0], []
    for count in batch.count_host:
        rows.append(rows[-1] + count)
    for begin, end in zip(edges, [*edges[1:], len(ends)], strict=True):
        part = _part(batch, begin, end)
        blocks = _expand_tables(part) if kinds[begin] else None
        pieces.append(Piece(slice(rows[begin], rows[end]), part, blocks))
    return pieces


def _part(batch: PagedBatch, begin: int, end: int) -> PagedBatch:
    """Return the batch of the sequences `begin` to `end`, whose rows count from 0. Nothing waits for the device.

    Tensors are copied, since views of them begin at addresses for which Triton would compile other kernels.
    """
    return PagedBatch(
        block_size=batch.block_size,
        block_table=batch.block_table[begin:end].clone(),
        query_offset=batch.query_offset[begin : end + 1] - batch.query_offset[begin],
        start=batch.start[begin:end].clone(),
        count_host=batch.count_host[begin:end],
        num_sink_blocks=0,
        first_block=batch.first_block[begin:end].clone(),
        attend_from=batch.attend_from[begin:end].clone(),
        slots=batch.slots[:0],  # nothing is written
        block_table_host=batch.block_table_host[begin:end],
        first_block_host=batch.first_block_host[begin:end],
        attend_from_host=batch.attend_from_host[begin:end],
        start_host=batch.start_host[begin:end],
    )


def _expand_tables(part: PagedBatch) -> torch.Tensor:
    """Give `part` the block tables of its expanded blocks, which lie one sequence after another; return their ids in the cache."""
    tokens = [start + count for start, count in zip(part.start_host, part.count_host, strict=True)]
    sizes = [-(-count // part.block_size) for count in tokens]
    begins = [sum(sizes[:b]) for b in range(len(sizes))]
    ids = torch.cat([part.block_table[b, :size] for b, size in enumerate(sizes)])
    columns = max(sizes)
    numbers = torch.arange(len(ids) + columns, dtype=torch.int32, device=ids.device)
    # Columns after a sequence's last block name other blocks; no query of the sequence sees a key there.
    part.block_table = torch.stack([numbers[begin : begin + columns] for begin in begins])
    if part.block_table_host:
        part.block_table_host = [list(range(begin, begin + columns)) for begin in begins]
    return ids
