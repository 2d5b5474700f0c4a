"""`moe`: bf16 experts and MXFP4 experts, for a prompt's tokens and for a few (decoding).

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.engine.kernel_cases.case import Case, Check, Prepared, Promise, Scale, Tensors
from benchmarks.engine.kernel_cases.rivals import EXPERT_TUNINGS, tuned_experts
from transom_kernels.moe.gpu import moe_triton
from transom_kernels.moe.gpu_weights import for_gpu
from transom_kernels.moe.op import moe_reference
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor

ERROR_LIMIT = 1e-2  # bf16 operands, and the row between the products rounded to bf16
CHECKED = 2  # tokens
WITH_TUNINGS = (16, 2048)  # tokens
COMPUTED = Promise(name="experts in bf16, 2k tokens", of="matrix rate", least=0.50)
READ = Promise(name="experts in bf16, 1 to 16 tokens", of="bandwidth", least=0.70)
READ_MX = replace(READ, name="experts in MXFP4, 1 to 16 tokens, of the bytes as stored")
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
    rule=GateRule(gain=1.702, limits=(7.0, 7.0), up_offset=1.0), interleaved=True,
)  # fmt: skip
MIXTRAL = Mixture(name="mixtral", experts=8, chosen=2, width=4096, inner=14_336)
TINY = Mixture(name="tiny", experts=4, chosen=2, width=64, inner=32, rule=GPT_OSS.rule, interleaved=True)


def cases(scale: Scale) -> Iterator[Case]:
    """Every mixture in bf16, gpt-oss in MXFP4."""
    for mixture in (TINY,) if scale.is_tiny else (GPT_OSS, MIXTRAL):
        for is_mx in (False, True) if mixture is not MIXTRAL else (False,):
            for tokens in scale.some((1, 4, 16, 128, 2048, 8192), (1, 16, 2048), (5,)):
                yield mixture_case(mixture, tokens, is_mx)


def mixture_case(mixture: Mixture, tokens: int, is_mx: bool) -> Case:
    """One mixture of experts over `tokens` tokens, with weights in MXFP4 or bfloat16."""
    promises: tuple[Promise, ...] = ()
    if tokens <= 16:
        promises = (READ_MX if is_mx else READ,)
    elif tokens == 2048 and not is_mx:
        promises = (COMPUTED,)
    return Case(
        name=f"moe {mixture.name} {'mxfp4' if is_mx else 'bf16'} tokens {tokens}",
        prepare=partial(_prepare, mixture, tokens, is_mx),
        formula="weights of the experts that some token chose, as stored, rows in and out; 6 N I for each of T K pairs",
        promises=promises,
        rivals=EXPERT_TUNINGS if mixture is GPT_OSS and tokens in WITH_TUNINGS else (),
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


def _some_experts(weights: torch.Tensor | MxTensor, ids: torch.Tensor) -> torch.Tensor | MxTensor:
    """The weights of these experts, in host memory, where the reference computes."""
    if isinstance(weights, torch.Tensor):
        return weights[ids].cpu()
    return MxTensor(blocks=weights.blocks[ids].cpu(), scales=weights.scales[ids].cpu())


def _prepare(mixture: Mixture, tokens: int, is_mx: bool, device: torch.device) -> Prepared:
    width, inner, rule = mixture.width, mixture.inner, mixture.rule
    tensors = ExpertTensors(
        gate_up=_weights((mixture.experts, 2 * inner, width), is_mx, device),
        down=_weights((mixture.experts, width, inner), is_mx, device),
        interleaved=mixture.interleaved,
    )
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    arranged = for_gpu(tensors)
    experts = torch.rand(tokens, mixture.experts, device=device).topk(mixture.chosen).indices
    weights = torch.rand(tokens, mixture.chosen, device=device)

    def run(rows: int = tokens) -> Tensors:
        return (moe_triton(x[:rows], experts[:rows], weights[:rows], arranged, rule),)

    def check(out: Tensors) -> list[Check]:
        """The last tokens, over the experts that they chose alone."""
        rows = slice(-CHECKED, None)
        ids, numbers = experts[rows].unique(return_inverse=True)
        chosen = replace(tensors, gate_up=_some_experts(tensors.gate_up, ids), down=_some_experts(tensors.down, ids))
        wanted = moe_reference(x[rows].float().cpu(), numbers.cpu(), weights[rows].cpu(), chosen, rule)
        return [Check(got=out[0][rows], wanted=wanted, limit=ERROR_LIMIT)]

    bytes_of_a_weight = 0.5 + 1 / 32 if is_mx else 2.0  # 4 bits, and a byte of scale for 32 of them
    return Prepared(
        run=run,
        check=check,
        num_bytes=int(len(experts.unique()) * 3 * inner * width * bytes_of_a_weight) + 2 * x.nbytes,
        flops=6 * inner * width * tokens * mixture.chosen,
        alone=lambda: [(run()[0][:1], run(1)[0])],
        rivals={name: partial(tuned_experts, name, run) for name in EXPERT_TUNINGS},
    )
