"""`route`: experts and weights of tokens, compared with the torch operators that it replaces.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Check, Prepared, Scale
from transom_kernels.route import Routing, router_layout
from transom_kernels.route.gpu import route_triton

ERROR_LIMIT = 1e-5  # sums in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A layer's router."""

    name: str
    experts: int
    width: int
    routing: Routing
    has_correction: bool = False


GPT_OSS = Mixture(name="gpt-oss", experts=32, width=2880, routing=Routing(num_chosen=4))
QWEN3 = Mixture(name="qwen3", experts=128, width=4096, routing=Routing(num_chosen=8))
DEEPSEEK = Mixture(
    name="deepseek", experts=256, width=7168, routing=Routing(num_chosen=8, score="sigmoid", scale=2.5), has_correction=True
)  # fmt: skip
TINY = Mixture(
    name="tiny", experts=6, width=150, routing=Routing(num_chosen=2, score="sqrt_softplus"), has_correction=True
)


def cases(scale: Scale) -> Iterator[Case]:
    """Decoding batches and prompts; nothing holds them to a target: they are over before they fill a GPU."""
    for mixture in (TINY,) if scale.is_tiny else (GPT_OSS, QWEN3, DEEPSEEK):
        for tokens in scale.some((1, 16, 256, 2048, 8192), (1, 256, 8192), (5,)):
            yield Case(
                name=f"route {mixture.name} tokens {tokens}",
                prepare=partial(_prepare, mixture, tokens),
                formula="rows and float32 weights in, experts and weights out; 2 T N E in float32",
            )


def _prepare(mixture: Mixture, tokens: int, device: torch.device) -> Prepared:
    shape, routing = (mixture.experts, mixture.width), mixture.routing
    x = torch.randn(tokens, mixture.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape, device=device) * mixture.width**-0.5
    correction = torch.rand(mixture.experts, device=device) if mixture.has_correction else None
    way = router_layout(weight)

    def run() -> tuple[torch.Tensor, ...]:
        return route_triton(x, way, routing, correction=correction)

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        """Weights are those of the experts that were chosen, and no other's preference is larger: where two are equal but for
        rounding either may be chosen."""
        experts, weights = out
        scores = _scores(x.double() @ weight.double().T, routing)
        preference = scores if correction is None else scores + correction.double()
        shares = scores.gather(1, experts)
        shares = shares / shares.sum(-1, keepdim=True) * routing.scale
        best = preference.topk(routing.num_chosen).values
        return [
            Check(got=weights, wanted=shares, limit=ERROR_LIMIT),
            Check(got=preference.gather(1, experts), wanted=best, limit=ERROR_LIMIT),
        ]

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole, one = run(), route_triton(x[:1], way, routing, correction=correction)
        return [(part[:1], part_alone) for part, part_alone in zip(whole, one, strict=True)]

    return Prepared(
        run=run,
        check=check,
        num_bytes=x.nbytes + weight.nbytes + tokens * routing.num_chosen * 12,
        alone=alone,
        rivals={"torch": lambda: _in_torch(x, weight, routing, correction)},
    )


def _scores(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    if routing.score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if routing.score == "sigmoid" else F.softplus(logits).sqrt()


def _in_torch(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> Callable[[], object]:
    """A launch an operator."""

    def run() -> object:
        scores = _scores(F.linear(x.float(), weight), routing)
        preference = scores if correction is None else scores + correction
        experts = preference.topk(routing.num_chosen).indices
        weights = scores.gather(1, experts)
        return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * routing.scale

    return run
