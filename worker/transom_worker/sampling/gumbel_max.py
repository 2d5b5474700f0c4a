"""The winner of logits plus Gumbel noise over whole rows, without drawing all the noise.

Legend: N rows, V vocabulary, B blocks of 64 ids, C (row, block) pairs that may hold a winner.

A block's best possible score is its largest logit with the block's minimum; a row's winner scores at least what its likeliest
token and every block's minimum token do. Blocks below that are out, exactly; some per cent of the vocabulary remain.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from transom_worker.sampling.noise import BLOCK, block_minimum, gumbel, gumbel_within
from transom_worker.sampling.row_ops import at_least, first_argmax, packed_columns

SLACK = 1e-9  # rounding of two logarithms


def gumbel_argmax(
    logits_NV: torch.Tensor, keys_N1: torch.Tensor, *, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's best `logits_NV` + gumbel(`keys_N1`, id), float64 [N], and its id, int64 [N]; the lowest id of equals.

    Column v is id `first_id` + v: a slice of the vocabulary has the scores that the whole has there.
    """
    num_rows, vocab_size = logits_NV.shape
    before, first_block = first_id % BLOCK, first_id // BLOCK
    after = -(before + vocab_size) % BLOCK
    padded_NV = functional.pad(logits_NV, (before, after), value=-torch.inf) if before or after else logits_NV
    blocks_NB64 = padded_NV.reshape(num_rows, -1, BLOCK)
    blocks = torch.arange(first_block, first_block + blocks_NB64.shape[1], device=logits_NV.device)
    minimum_NB, place_NB = block_minimum(keys_N1, blocks)
    noise_NB = minimum_NB.log().neg_()
    best_NB = blocks_NB64.amax(-1) + noise_NB
    reached_N1 = _surely_reached(logits_NV, blocks_NB64, keys_N1, noise_NB, place_NB, first_id)
    row_C, block_C = at_least(best_NB, reached_N1 - SLACK)
    token_ids_C64 = blocks[block_C, None] * BLOCK + torch.arange(BLOCK, device=logits_NV.device)
    noise_C64 = gumbel_within(
        keys_N1[row_C], token_ids_C64, minimum_NB[row_C, block_C, None], place_NB[row_C, block_C, None]
    )
    score_C, place_C = (noise_C64 + blocks_NB64[row_C, block_C]).max(-1)
    column_C, width = packed_columns(row_C, num_rows)
    score_NW = score_C.new_full((num_rows, width), -torch.inf)
    score_NW[row_C, column_C] = score_C
    winner_NW = torch.full(score_NW.shape, first_id, device=logits_NV.device)
    winner_NW[row_C, column_C] = blocks[block_C] * BLOCK + place_C
    best_N1 = first_argmax(score_NW)[:, None]
    return score_NW.gather(1, best_N1)[:, 0], winner_NW.gather(1, best_N1)[:, 0]


def _surely_reached(
    logits_NV: torch.Tensor,
    blocks_NB64: torch.Tensor,
    keys_N1: torch.Tensor,
    noise_NB: torch.Tensor,
    place_NB: torch.Tensor,
    first_id: int,
) -> torch.Tensor:
    """A score that each row's winner reaches, [N, 1]."""
    likeliest_N1 = first_argmax(logits_NV)[:, None]
    of_likeliest_N1 = logits_NV.gather(1, likeliest_N1) + gumbel(keys_N1, likeliest_N1 + first_id)
    of_minima_NB = blocks_NB64.gather(-1, place_NB[..., None])[..., 0] + noise_NB
    return torch.maximum(of_likeliest_N1, of_minima_NB.amax(-1, keepdim=True))
