"""The operators `hc_norm`, `hc_pre`, `hc_post` and `hc_head`: DeepSeek V4's hyper-connections.

A *hyper-connection* replaces the residual connection of a sublayer (attention or feed-forward). The residual is S parallel
*residual streams* instead of one: a token has S hidden states x[0], ..., x[S - 1]. Three sets of coefficients, computed from the
streams of each token, connect the streams to the sublayer:

    input  = sum_s pre[s] * x[s]                                 what the sublayer reads (`hc_pre`)
    x'[to] = sum_from mix[from, to] * x[from] + post[to] * y     its output y goes back into the streams (`hc_post`)

Sinkhorn's iteration makes `mix` (nearly) doubly stochastic: for a number of *rounds* columns and rows are divided by their sums in
turn, until each adds up to nearly 1. Mixing then neither amplifies nor damps the streams. (DeepSeek's paper "mHC:
Manifold-Constrained Hyper-Connections" writes H_pre, H_post and H_res.) After the last layer `hc_head` sums the streams into one.

Each coefficient is computed from a logit. The logits of a token are `projected * scale + base` [T, M] in float32: `projected` is
`hc_norm(x)` times a learned matrix, and `scale` and `base` are learned vectors [M]. The order of logits is:

    [0, S)        logits of pre
    [S, 2 S)      logits of post           (in a sublayer only)
    [2 S, M)      logits of mix [from, to] (in a sublayer only)

Legend: T tokens, S residual streams, N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

import torch
import torch.nn.functional as F

from transom_kernels.hyper_connections.cpu import fits_cpu, hc_norm_cpu
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton


def hc_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return all streams of a token divided by their common root mean square: [T, S * N] float32 of `x` [T, S, N].

    Raises:
        ValueError: `x` has no streams.
    """
    _check_streams(x)
    if uses_triton(x):
        out: torch.Tensor = implementation("hyper_connections.gpu", "hc_norm_triton")(x, eps)
        return out
    if _uses_cpu_kernels(x):
        return hc_norm_cpu(x, eps)
    return hc_norm_reference(x, eps)


def hc_pre(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a sublayer's input [T, N] in the dtype of `x` [T, S, N], and post [T, S] and mix [T, S from, S to] in float32.

    pre is `sigmoid(logits) + eps`, and the sum of the streams weighted by pre is computed in float32. post is
    `2 * sigmoid(logits)`. mix starts as a softmax over the target streams plus `eps`; then its columns and its rows are divided by
    their sums plus `eps` in turn, `2 * rounds - 1` times, columns first and last. `x` may have any strides; all its streams may be
    one tensor (stride 0).

    Raises:
        ValueError: shapes or dtypes do not fit, or `rounds` is below 1.
    """
    _check_streams(x)
    _check_coefficients(x, x.shape[1] * (x.shape[1] + 2), projected, scale, base)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give at least 1.")
    if uses_triton(x) and x.stride(2) == 1:
        from transom_kernels.hyper_connections.gpu import hc_pre_triton

        return hc_pre_triton(x, projected, scale, base, rounds=rounds, eps=eps)
    return hc_pre_reference(x, projected, scale, base, rounds=rounds, eps=eps)


def hc_head(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Return the sum [T, N] of the streams after the last layer, weighted by `sigmoid(logits) + eps` as in `hc_pre`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_streams(x)
    _check_coefficients(x, x.shape[1], projected, scale, base)
    if uses_triton(x) and x.stride(2) == 1:
        out: torch.Tensor = implementation("hyper_connections.gpu", "hc_head_triton")(
            x, projected, scale, base, eps=eps
        )
        return out
    return hc_head_reference(x, projected, scale, base, eps=eps)


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Return the streams after a sublayer, `mix^T x + post * y` [T, S, N]; `y` [T, N] is its output, `x` the streams before it.

    `post` and `mix` come from `hc_pre` and are first rounded to the dtype of `x`. The mixed streams are rounded, and so is their
    sum with the weighted output.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_streams(x)
    tokens, size, width = x.shape
    shapes = [tuple(part.shape) for part in (y, post, mix)]
    if shapes != [(tokens, width), (tokens, size), (tokens, size, size)] or y.dtype != x.dtype:
        raise ValueError(
            f"y {shapes[0]} {y.dtype}, post {shapes[1]} and mix {shapes[2]} do not fit streams {tuple(x.shape)} {x.dtype}; "
            "give [T, N] of the same dtype, [T, S] and [T, S, S]."
        )
    if uses_triton(x) and x.stride(2) == 1 and y.stride(1) == 1:
        out: torch.Tensor = implementation("hyper_connections.gpu", "hc_post_triton")(y, x, post, mix)
        return out
    return hc_post_reference(y, x, post, mix)


def hc_norm_reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `hc_norm` in torch: the specification."""
    flat = x.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + eps)


def hc_pre_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `hc_pre` in torch: the specification."""
    size = x.shape[1]
    pre, post, mix = (projected * scale + base).split_with_sizes((size, size, size * size), dim=1)
    balanced = _balance(mix.view(-1, size, size).softmax(dim=2) + eps, rounds, eps)
    return _weighted_sum(x, pre.sigmoid() + eps).to(x.dtype), 2 * post.sigmoid(), balanced


def hc_head_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Compute `hc_head` in torch: the specification."""
    # strided, as in `hc_pre`: a contiguous tensor's last elements have another exp, so a token's bits would depend on the others
    logits = F.pad(projected * scale + base, (0, 1))[:, : x.shape[1]]
    return _weighted_sum(x, logits.sigmoid() + eps).to(x.dtype)


def hc_post_reference(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Compute `hc_post` in torch: the specification."""
    shares = mix.to(x.dtype).float()
    mixed = torch.stack([_weighted_sum(x, shares[:, :, to]).to(x.dtype) for to in range(x.shape[1])], dim=1)
    return mixed.addcmul_(post.to(x.dtype)[:, :, None], y[:, None])


def _uses_cpu_kernels(x: torch.Tensor) -> bool:
    """Return whether the CPU kernels compute on these streams."""
    return uses_cpu_kernels(x) and fits_cpu(x)


def _check_streams(x: torch.Tensor) -> None:
    """Raise ValueError unless `x` is [T, S, N] with at least one stream and one element."""
    if x.dim() != 3 or not x.shape[1] or not x.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} has no streams; give [tokens, streams, width].")


def _check_coefficients(x: torch.Tensor, size: int, *parts: torch.Tensor) -> None:
    """Raise ValueError unless `parts` (projected coefficients [T, M], scale [M], base [M]) have M = `size` and are float32."""
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(len(x), size), (size,), (size,)]:
        raise ValueError(
            f"projected, scale, base {shapes} do not fit streams {tuple(x.shape)}: there are {size} coefficients."
        )
    if any(part.dtype != torch.float32 for part in parts):
        raise ValueError(f"projected, scale, base are {[part.dtype for part in parts]}; coefficients are float32.")


def _balance(mix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Divide columns and rows by their sums in turn (Sinkhorn's iteration), so that both nearly add up to 1."""
    # on CPUs torch would turn a Python number into a tensor at each addition; on GPUs making a tensor would wait for the device
    addend = mix.new_tensor(eps) if mix.device.type == "cpu" else eps
    for turn in range(2 * rounds - 1):
        mix.div_(mix.sum(dim=2 if turn % 2 else 1, keepdim=True).add_(addend))
    return mix


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sum over s of weight[t, s] * x[t, s], [T, N] float32, always added in this order."""
    total = weight[:, 0, None] * x[:, 0]
    for stream in range(1, x.shape[1]):
        total.addcmul_(weight[:, stream, None], x[:, stream].float())
    return total
