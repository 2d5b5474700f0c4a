"""`sample` and `best_of_slice` in torch: the specification, and the fallback where no kernel runs. It defines the noise.

A row's logits are divided by its temperature, filters leave some tokens, and the token with the largest sum of logit and Gumbel
noise wins. Winners follow the softmax distribution of the tokens that are left. Gumbel noise is -log(E), where E is an exponential
variable.

Noise is a function of the row's key and the token id:

1. Bits: an element's random bits are SplitMix64's finaliser over `key + counter * GOLDEN`, in wrapping int64 arithmetic.
2. Uniform: (52 of the bits + 1/2) * 2**-52 is an exact float64 inside (0, 1), an odd multiple of 2**-53.
3. Blocks: token ids form blocks of 64. Counter -1 - block gives the least of the block's 64 exponential variables and the id that
   has it; every other id adds an exponential variable of its own, whose counter is the id, to the least one. This gives 64
   independent exponential variables: the least of 64 is itself exponential at 64 times the rate, each id has it with equal
   chance, and the amounts by which the others exceed it are again independent exponential variables. So one draw bounds the noise
   of a whole block, and the kernels skip most blocks.

Legend: S rows, V vocabulary, C changes to logits, N elements of any shape.
"""

import math
from dataclasses import dataclass

import torch

NOISE_BLOCK = 64
"""Token ids of a noise block. The largest noise of a block is one random number (step 3 above)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """Temperature, filters, noise key and logit changes of each row.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `temperature` 0 takes the most likely token (greedy).

    Logit changes (penalties and biases) come first: the logit of token `change_id` in row `change_row` is divided by
    `change_factor` if the logit is positive, and multiplied by it otherwise; then `change_minus` is subtracted. A pair of row and
    id occurs at most once.
    """

    temperature: torch.Tensor  # [S] float32
    top_k: torch.Tensor  # [S] int32
    top_p: torch.Tensor  # [S] float32
    min_p: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S] int64: the noise is a function of a row's key and the token id
    change_row: torch.Tensor | None = None  # [C] int64
    change_id: torch.Tensor | None = None  # [C] int64
    change_factor: torch.Tensor | None = None  # [C] float32
    change_minus: torch.Tensor | None = None  # [C] float32


MAX_NOISE = 1 << 22  # float64 numbers that are drawn at once
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_reference(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Sample one token id for each row of `logits` [S, V] float32 by `params`; return [S] int64. Logits are changed in place."""
    apply_changes(logits, params)
    columns = zip(
        *(part.tolist() for part in (params.temperature, params.top_k, params.top_p, params.min_p)), strict=True
    )
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for row, (temperature, top_k, top_p, min_p) in enumerate(columns):
        scores = logits[row]
        if temperature > 0.0:
            scaled = scores / temperature
            noise = gumbel(params.keys[row], torch.arange(len(scaled), device=scaled.device))
            scores = (scaled + noise).masked_fill_(~kept(scaled, top_k, top_p, min_p), -torch.inf)
        out[row] = scores.max(0).indices  # of equal scores the lowest id
    return out


def best_of_slice_reference(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's best score [S] float64 and its id [S] int64; `logits` [S, V] are those of the ids from `first_id` on."""
    greedy = logits.max(1)
    scores, found = greedy.values.double(), greedy.indices + first_id
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    random = temperature.nonzero()[:, 0]
    for rows in random.split(max(1, MAX_NOISE // len(ids))):
        scaled = logits.index_select(0, rows) / temperature[rows, None]
        best = (scaled + gumbel(keys[rows, None], ids)).max(1)
        scores[rows], found[rows] = best.values, best.indices + first_id
    return scores, found


def apply_changes(logits: torch.Tensor, params: SampleParams) -> None:
    """Apply the logit changes of `params` in place."""
    if params.change_row is None:
        return
    assert params.change_id is not None
    assert params.change_factor is not None
    assert params.change_minus is not None
    at = (params.change_row, params.change_id)
    value, factor = logits[at], params.change_factor
    logits[at] = torch.where(value > 0, value / factor, value * factor) - params.change_minus


def kept(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which tokens of a row the filters keep, [V] bool; `scaled` [V] are the logits divided by the temperature.

    Each filter keeps all tokens that are at least as likely as some bound, so tokens with equal logits are kept or removed
    together. top_p renormalises what top_k has kept and keeps the most likely tokens until their probabilities add up to `top_p`;
    min_p is relative to the most likely token. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.
    """
    bound = torch.full((), -torch.inf, dtype=torch.float64, device=scaled.device)
    if 0 < top_k < len(scaled):
        bound = scaled.topk(top_k).values[-1].double()
    if top_p < 1.0:
        ordered = scaled.sort(descending=True).values.double()
        weights = (ordered - ordered[0]).exp_().masked_fill_(ordered < bound, 0.0)
        up_to = weights.cumsum(0)
        is_inside = up_to - weights < top_p * up_to[-1]  # the more likely tokens do not add up to top_p yet
        bound = torch.maximum(bound, ordered.masked_fill_(~is_inside, torch.inf).min())
    if min_p > 0.0:
        bound = torch.maximum(bound, scaled.max().double() + math.log(min_p))
    return scaled >= bound


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise in float64; int64 `keys` [N] and `token_ids` [N] broadcast."""
    # counters of ids are 0, 1, ...; those of blocks are -1, -2, ...
    bits = random_bits(keys, -1 - token_ids // NOISE_BLOCK)
    offset = bits & (NOISE_BLOCK - 1)  # the lowest bits, which `_to_uniform` leaves out
    minimum = _to_uniform(bits).log_().mul_(-1.0 / NOISE_BLOCK)
    excess = (
        _to_uniform(random_bits(keys, token_ids)).log_().neg_().masked_fill_(token_ids % NOISE_BLOCK == offset, 0.0)
    )
    return excess.add_(minimum).log_().neg_()


def random_bits(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for each element, as int64 [N]."""
    bits = counters * _signed(GOLDEN) + keys
    bits = _xor_shift(bits, 30).mul_(_signed(MIX_1))
    bits = _xor_shift(bits, 27).mul_(_signed(MIX_2))
    return _xor_shift(bits, 31)


def _to_uniform(bits: torch.Tensor) -> torch.Tensor:
    return (bits >> 12).bitwise_and_(2**52 - 1).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _xor_shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    # The mask clears the copies of the sign bit that an int64 shift brings in.
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1).bitwise_xor_(bits)


def _signed(value: int) -> int:
    return value - 2**64
