"""The Triton kernels of an MoE router: `score_experts` (partial logits) and `choose_experts` (top-k and weights).

    logits = x @ weight^T + bias,  scores = softmax, sigmoid or sqrt(softplus) of the logits
    chosen = the K largest of logits (or scores + correction),  weights = scores[chosen], normalised, * scale * expert_scale

The product is true float32, without tensor cores. It is split along N, so that many programs run at once. A partial logit is
one chain of multiply-adds along N, whatever the tile, and partial logits are added in one order: no sum depends on the
number of tokens.

Legend: T tokens, N hidden width, E experts, K experts per token, S splits of N.
"""

from __future__ import annotations

import triton
import triton.language as tl

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SQRT_SOFTPLUS = tl.constexpr(2)

_NEVER = tl.constexpr(-(2**62))  # below every key: experts that do not exist or are chosen already


@triton.jit(do_not_specialize=["num_tokens"])
def score_experts(
    x,  # [T, N]
    weight,  # [E, N] float32
    partials,  # [T, S, E] float32
    num_tokens,
    x_stride,  # elements from token to token
    weight_stride_e,
    weight_stride_n,
    E: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,  # elements of N
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the partial logits of a tile of tokens and experts over `SPLIT` elements of N. The grid is (T tiles, E tiles, S)."""
    SPLITS: tl.constexpr = (N + SPLIT - 1) // SPLIT
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = x + t.to(tl.int64)[:, None] * x_stride
    columns = weight + e[None, :] * weight_stride_e
    partial = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for step in range(SPLIT // BLOCK_N):
        n = tl.program_id(2) * SPLIT + step * BLOCK_N + tl.arange(0, BLOCK_N)
        a = tl.load(rows + n[None, :], mask=(t < num_tokens)[:, None] & (n < N)[None, :], other=0.0)
        places = columns + n[:, None] * weight_stride_n
        b = tl.load(places, mask=(n < N)[:, None] & (e < E)[None, :], other=0.0)
        partial = tl.dot(a.to(tl.float32), b, partial, input_precision="ieee")
    places = partials + (t.to(tl.int64) * SPLITS + tl.program_id(2))[:, None] * E + e[None, :]
    tl.store(places, partial, mask=(t < num_tokens)[:, None] & (e < E)[None, :])


@triton.jit
def _scores(logits, is_expert, SCORE: tl.constexpr):
    """Scores [BLOCK_E] of logits."""
    if SCORE == SOFTMAX:
        weights = tl.exp(logits - tl.max(tl.where(is_expert, logits, float("-inf")), 0))
        return weights / tl.sum(tl.where(is_expert, weights, 0.0), 0)
    if SCORE == SIGMOID:
        return tl.sigmoid(logits)
    # softplus(x) = log1p(exp(x)), linear from 20 on as in torch; log1p(a) = log(1 + a) * a / ((1 + a) - 1) keeps a small a's digits
    addend = tl.exp(tl.where(logits > 20.0, 20.0, logits))
    one_plus = 1.0 + addend
    log1p = tl.where(
        one_plus == 1.0, addend, tl.log(one_plus) * (addend / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0))
    )
    return tl.sqrt(tl.where(logits > 20.0, logits, log1p))


@triton.jit
def _keys(preference, e):
    """Integers that order experts as they are chosen: larger preferences first, NaN before all, of equal ones the first expert.

    A key is (sortable bits of the float << 16) + 65535 - expert, so the expert can be read from the largest key.
    """
    bits = (preference + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = tl.where(preference == preference, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 16) | (65535 - e)


@triton.jit
def choose_experts(
    partials,  # [T, S, E] float32
    bias,  # [E] float32, or unused
    correction,  # [E] float32, or unused
    expert_scale,  # [E] float32, or unused
    chosen,  # [T, K] int64, or unused
    experts,  # [T, K] int64
    weights,  # [T, K] float32
    scale,  # multiplies all weights
    tiny,  # `rule.TINY`
    E: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_FIXED: tl.constexpr,  # `chosen` gives the experts
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Choose the experts of one token: add partial logits, compute scores, take the K largest keys. The grid is (T)."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_expert = e < E

    # logits and scores
    s = tl.arange(0, BLOCK_S)
    places = partials + (token * SPLITS + s)[:, None] * E + e[None, :]
    logits = tl.sum(tl.load(places, mask=(s < SPLITS)[:, None] & is_expert[None, :], other=0.0), 0)
    if HAS_BIAS:
        logits += tl.load(bias + e, mask=is_expert, other=0.0)
    scores = _scores(logits, is_expert, SCORE)

    # the choice: `ids` and their scores `found`, best first
    ids = tl.zeros([BLOCK_K], tl.int64)
    found = tl.zeros([BLOCK_K], tl.float32)
    if IS_FIXED:
        ids = tl.load(chosen + token * K + k, mask=k < K, other=0)
        for rank in range(K):
            expert = tl.load(chosen + token * K + rank)
            found = tl.where(k == rank, tl.sum(tl.where(e == expert, scores, 0.0), 0), found)
    else:
        preference = logits
        if HAS_CORRECTION:
            preference = scores + tl.load(correction + e, mask=is_expert, other=0.0)
        keys = tl.where(is_expert, _keys(preference, e), _NEVER)
        for rank in range(K):
            expert = 65535 - (tl.max(keys, 0) & 65535)
            found = tl.where(k == rank, tl.sum(tl.where(e == expert, scores, 0.0), 0), found)
            ids = tl.where(k == rank, expert, ids)
            keys = tl.where(e == expert, _NEVER, keys)

    # weights
    if NORMALISE:
        found = found / (tl.sum(found, 0) + tiny)
    found *= scale
    if HAS_SCALE:
        found *= tl.load(expert_scale + ids, mask=k < K, other=0.0)
    tl.store(experts + token * K + k, ids, mask=k < K)
    tl.store(weights + token * K + k, found, mask=k < K)
