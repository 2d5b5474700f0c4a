"""Gumbel-max sampling of whole rows, without drawing the noise of every token.

Gumbel-max sampling takes the token with the largest score, logit plus Gumbel noise. Token ids are divided into blocks of 64,
and `noise` gives the largest noise of each block with one draw:

1. upper bound of a block: its largest logit plus its largest noise. No token of the block scores more.
2. reached score of a row: the best of the most likely token's score and the scores of the tokens with each block's largest
   noise. The winner scores at least that much.
3. Blocks whose upper bound is below the row's reached score cannot hold the winner. Some per cent of the vocabulary remain, and
   only their noise is drawn. This is exact, not an approximation.

Legend: N rows, V vocabulary, B blocks of 64 ids, C (row, block) pairs that may hold a winner, W pairs of the row that has most.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from transom_worker.sampling.noise import BLOCK, block_minimum, gumbel, gumbel_within
from transom_worker.sampling.row_ops import entries_at_least, first_argmax, packed_columns

ROUNDING_SLACK = 1e-9  # two logarithms are rounded differently in the bound and in the score


def gumbel_argmax(
    logits_NV: torch.Tensor, keys_N1: torch.Tensor, *, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest `logits_NV` + gumbel(`keys_N1`, id), float64 [N], and its id, int64 [N]; the lowest id of equal
    scores.

    Column v is token id `first_id` + v, so a slice of the vocabulary has the same scores as the whole vocabulary has there.
    """
    num_rows, vocab_size = logits_NV.shape
    num_before, first_block = first_id % BLOCK, first_id // BLOCK
    num_after = -(num_before + vocab_size) % BLOCK
    padded_NV = (
        functional.pad(logits_NV, (num_before, num_after), value=-torch.inf) if num_before or num_after else logits_NV
    )
    blocks_NB64 = padded_NV.reshape(num_rows, -1, BLOCK)
    blocks = torch.arange(first_block, first_block + blocks_NB64.shape[1], device=logits_NV.device)
    minimum_NB, offset_NB = block_minimum(keys_N1, blocks)
    noise_NB = minimum_NB.log().neg_()
    best_NB = blocks_NB64.amax(-1) + noise_NB
    reached_N1 = _reached_score(logits_NV, blocks_NB64, keys_N1, noise_NB, offset_NB, first_id)
    row_C, block_C = entries_at_least(best_NB, reached_N1 - ROUNDING_SLACK)
    token_ids_C64 = blocks[block_C, None] * BLOCK + torch.arange(BLOCK, device=logits_NV.device)
    noise_C64 = gumbel_within(
        keys_N1[row_C], token_ids_C64, minimum_NB[row_C, block_C, None], offset_NB[row_C, block_C, None]
    )
    score_C, offset_C = (noise_C64 + blocks_NB64[row_C, block_C]).max(-1)
    column_C, width = packed_columns(row_C, num_rows)
    score_NW = score_C.new_full((num_rows, width), -torch.inf)
    score_NW[row_C, column_C] = score_C
    winner_NW = torch.full(score_NW.shape, first_id, device=logits_NV.device)
    winner_NW[row_C, column_C] = blocks[block_C] * BLOCK + offset_C
    best_N1 = first_argmax(score_NW)[:, None]
    return score_NW.gather(1, best_N1)[:, 0], winner_NW.gather(1, best_N1)[:, 0]


def _reached_score(
    logits_NV: torch.Tensor,
    blocks_NB64: torch.Tensor,
    keys_N1: torch.Tensor,
    noise_NB: torch.Tensor,
    offset_NB: torch.Tensor,
    first_id: int,
) -> torch.Tensor:
    """Return a score that each row's winner reaches, [N, 1]."""
    most_likely_N1 = first_argmax(logits_NV)[:, None]
    most_likely_score_N1 = logits_NV.gather(1, most_likely_N1) + gumbel(keys_N1, most_likely_N1 + first_id)
    block_score_NB = blocks_NB64.gather(-1, offset_NB[..., None])[..., 0] + noise_NB
    return torch.maximum(most_likely_score_N1, block_score_NB.amax(-1, keepdim=True))
