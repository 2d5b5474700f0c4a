"""`moe`: bf16 experts and MXFP4 experts, for a prompt's tokens and for a few (decoding).

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale, Target
from transom_kernels.moe.gpu import moe_triton
from transom_kernels.moe.reference import gated
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor

ERROR_LIMIT = 1e-2  # bf16 operands, and the row between the products rounded to bf16
CHECKED_TOKENS = 6
COMPUTED, READ = Target(least=0.50, of="matrix rate"), Target(least=0.70, of="bandwidth")
SWIGLU = GateRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A layer's experts."""

    name: str
    experts: int
    chosen: int
    width: int
    inner: int
    rule: GateRule = SWIGLU
    interleaved: bool = False


GPT_OSS = Mixture(
    name="gpt-oss", experts=32, chosen=4, width=2880, inner=2880,
    rule=GateRule(gain=1.702, limit=7.0, up_offset=1.0), interleaved=True,
)  # fmt: skip
MIXTRAL = Mixture(name="mixtral", experts=8, chosen=2, width=4096, inner=14_336)
TINY = Mixture(name="tiny", experts=4, chosen=2, width=64, inner=32, rule=GPT_OSS.rule, interleaved=True)


def cases(scale: Scale) -> Iterator[Case]:
    """Every mixture in bf16, gpt-oss in MXFP4."""
    mixtures = (TINY,) if scale.is_tiny else (GPT_OSS, MIXTRAL)
    for mixture in mixtures:
        for is_mx in (False, True) if mixture is not MIXTRAL else (False,):
            for tokens in scale.some((1, 4, 16, 128, 2048, 8192), (1, 16, 2048), (5,)):
                yield mixture_case(mixture, tokens, is_mx)


def mixture_case(mixture: Mixture, tokens: int, is_mx: bool) -> Case:
    """One mixture of experts over so many tokens, with weights in MXFP4 or bfloat16."""
    target = READ if tokens <= 16 else COMPUTED if tokens == 2048 and not is_mx else None
    return Case(
        name=f"moe {mixture.name} {'mxfp4' if is_mx else 'bf16'} tokens {tokens}",
        prepare=partial(_prepare, mixture, tokens, is_mx),
        formula="weights of the experts that some token chose, as stored, rows in and out; 6 N I for each of T K pairs",
        target=target,
        is_invariant=False,  # tiles are chosen by how many rows an expert gets
    )


def _weights(shape: tuple[int, int, int], is_mx: bool, device: torch.device) -> torch.Tensor | MxTensor:
    experts, rows, columns = shape
    if not is_mx:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * columns**-0.5
    return MxTensor(
        blocks=torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device),
        scales=torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8, device=device),
    )


def _expert(tensors: ExpertTensors, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's matrices in float64."""

    def wide(part: torch.Tensor | MxTensor) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part[expert].double()
        one = slice(expert, expert + 1)
        return MxTensor(blocks=part.blocks[one], scales=part.scales[one]).dequantised()[0].double()

    return wide(tensors.gate_up), wide(tensors.down)


def _prepare(mixture: Mixture, tokens: int, is_mx: bool, device: torch.device) -> Prepared:
    width, inner, rule = mixture.width, mixture.inner, mixture.rule
    tensors = ExpertTensors(
        gate_up=_weights((mixture.experts, 2 * inner, width), is_mx, device),
        down=_weights((mixture.experts, width, inner), is_mx, device),
        interleaved=mixture.interleaved,
    )
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    experts = torch.rand(tokens, mixture.experts, device=device).topk(mixture.chosen).indices
    weights = torch.rand(tokens, mixture.chosen, device=device)
    used = len(experts.unique())

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        rows = sorted({at * (tokens - 1) // max(1, CHECKED_TOKENS - 1) for at in range(CHECKED_TOKENS)})
        wanted = torch.zeros(len(rows), width, dtype=torch.float64, device=device)
        for at, row in enumerate(rows):
            for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
                gate_up, down = _expert(tensors, expert)
                both = gate_up @ x[row].double()
                gate, up = (both[0::2], both[1::2]) if mixture.interleaved else both.chunk(2)
                wanted[at] += weight * (down @ gated(gate, up, rule))
        return [Check(got=out[0][rows], wanted=wanted, limit=ERROR_LIMIT)]

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole = moe_triton(x, experts, weights, tensors, rule)
        return [(whole[:1], moe_triton(x[:1], experts[:1], weights[:1], tensors, rule))]

    element_bytes = 0.5 + 1 / 32 if is_mx else 2.0
    return Prepared(
        run=lambda: (moe_triton(x, experts, weights, tensors, rule),),
        check=check,
        num_bytes=int(used * 3 * inner * width * element_bytes) + 2 * x.nbytes,
        flops=6 * inner * width * tokens * mixture.chosen,
        alone=alone,
    )
