"""Hyper-connections: `hc_norm`, `hc_pre` and `hc_post` in DeepSeek V4's sizes.

Legend: T tokens, S residual streams, N hidden width, M coefficients of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale
from transom_kernels.hyper_connections.gpu import (
    hc_norm_triton,
    hc_post_triton,
    hc_pre_triton,
)

EPS, ROUNDS = 1e-6, 20
STREAMS = 4
ERROR_LIMIT = 6e-3  # one rounding to bf16
CHECKED = 256
Tensors = tuple[torch.Tensor, ...]


def cases(scale: Scale) -> Iterator[Case]:
    """No figure is promised: shares of the floor say where it stands."""
    for tokens in scale.some((1, 64, 8192), (64, 8192), (3,)):
        for what, make, formula in (
            ("norm", _norm, "2 T S N bytes read, 4 T S N written"),
            ("collapse", _collapse, "2 T (S + 1) N bytes and coefficients"),
            ("expand", _expand, "2 T (2 S + 1) N bytes and coefficients"),
        ):
            yield Case(name=f"streams {what} tokens {tokens}", prepare=partial(make, tokens, scale), formula=formula)


def _streams(tokens: int, scale: Scale, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, STREAMS, scale.pick(7168, 40), device=device, dtype=torch.bfloat16)


def _norm(tokens: int, scale: Scale, device: torch.device) -> Prepared:
    x = _streams(tokens, scale, device)

    def check(out: Tensors) -> list[Check]:
        wide = x[:CHECKED].flatten(1).double()
        wanted = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
        return [Check(got=out[0][:CHECKED], wanted=wanted, limit=1e-5)]

    return Prepared(
        run=lambda: (hc_norm_triton(x, EPS),),
        check=check,
        num_bytes=3 * x.nbytes,
        alone=lambda: [(hc_norm_triton(x, EPS)[:1], hc_norm_triton(x[:1], EPS))],
    )


def _collapse(tokens: int, scale: Scale, device: torch.device) -> Prepared:
    x, size = _streams(tokens, scale, device), STREAMS * (STREAMS + 2)
    projected, factor, base = (torch.randn(*shape, device=device) for shape in ((tokens, size), (size,), (size,)))

    def run(rows: int = tokens) -> Tensors:
        return hc_pre_triton(x[:rows], projected[:rows], factor, base, rounds=ROUNDS, eps=EPS)

    def check(out: Tensors) -> list[Check]:
        logits = (projected[:CHECKED] * factor + base).double()
        collapse, expand, mix = logits.split_with_sizes((STREAMS, STREAMS, STREAMS * STREAMS), 1)
        collapsed = ((collapse.sigmoid() + EPS)[:, :, None] * x[:CHECKED].double()).sum(1)
        return [
            Check(got=out[0][:CHECKED], wanted=collapsed, limit=ERROR_LIMIT),
            Check(got=out[1][:CHECKED], wanted=2 * expand.sigmoid(), limit=1e-5),
            Check(got=out[2][:CHECKED], wanted=_balanced(mix.view(-1, STREAMS, STREAMS)), limit=1e-5),
        ]

    kept = 4 * tokens * (size + STREAMS + STREAMS * STREAMS)
    return Prepared(
        run=run,
        check=check,
        num_bytes=x.nbytes + x[:, 0].numel() * 2 + kept,
        alone=lambda: [(many[:1], one) for many, one in zip(run(), run(1), strict=True)],
    )


def _balanced(logits: torch.Tensor) -> torch.Tensor:
    mix = logits.softmax(2) + EPS
    for turn in range(2 * ROUNDS - 1):
        mix = mix / (mix.sum(2 if turn % 2 else 1, keepdim=True) + EPS)
    return mix


def _expand(tokens: int, scale: Scale, device: torch.device) -> Prepared:
    x = _streams(tokens, scale, device)
    y, expand = torch.randn_like(x[:, 0]), torch.rand(tokens, STREAMS, device=device)
    mix = torch.randn(tokens, STREAMS, STREAMS, device=device).softmax(2)

    def run(rows: int = tokens) -> Tensors:
        return (hc_post_triton(y[:rows], x[:rows], expand[:rows], mix[:rows]),)

    def check(out: Tensors) -> list[Check]:
        shares, weights = (part[:CHECKED].bfloat16().double() for part in (mix, expand))
        mixed = torch.einsum("tij,tin->tjn", shares, x[:CHECKED].double())
        wanted = mixed + weights[:, :, None] * y[:CHECKED, None].double()
        return [Check(got=out[0][:CHECKED], wanted=wanted, limit=2 * ERROR_LIMIT)]  # the mixed streams are rounded, too

    return Prepared(
        run=run,
        check=check,
        num_bytes=2 * x.nbytes + y.nbytes + expand.nbytes + mix.nbytes,
        alone=lambda: [(run()[0][:1], run(1)[0])],
    )
