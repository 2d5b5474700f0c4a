"""Row-wise operators: norms, RoPE, gated activations.

Legend: T rows, N width, H heads, D head width.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.engine.kernel_cases.case import Case, Check, Prepared, Promise, Scale, Tensors
from transom_kernels.gated_mlp.gpu import gated_activation_triton
from transom_kernels.gated_mlp.op import activated_product_reference
from transom_kernels.rms_norm.gpu import rms_norm_triton
from transom_kernels.rms_norm.op import rms_norm_reference
from transom_kernels.rotary.gpu import rotary_triton_
from transom_kernels.rotary.op import rotary_reference

EPS = 1e-6
ERROR_LIMIT = 6e-3  # one rounding to bf16
CHECKED = 128  # rows at either end
NORMS = Promise(name="norms", of="bandwidth", least=0.80)
HEADS, SIZE = 40, 128  # queries and keys of one token
Rows = tuple[int, int]


def cases(scale: Scale) -> Iterator[Case]:
    """Of a long prompt's rows, and of a decoding batch's, of which nothing is promised: they are over before they fill a GPU."""
    many, few = scale.pick(32_768, 6), scale.pick(64, 3)
    width, inner = scale.pick(4096, 40), scale.pick(14_336, 48)
    for rows in (many, few):
        promises = (NORMS,) if rows == many else ()
        for name, prepare, formula, promised in (
            ("norm with residual", partial(_norm, (rows, width), False), "4 T N", promises),
            ("norms around a residual", partial(_norm, (rows, width), True), "4 T N", promises),
            ("rotary", partial(_rotary, (rows, HEADS)), "2 T H D and the tables", ()),
            ("gated silu", partial(_gated, (rows, inner)), "3 T N", ()),
        ):
            yield Case(name=f"{name} rows {rows}", prepare=prepare, formula=formula, promises=promised)


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _norm(shape: Rows, has_inner: bool, device: torch.device) -> Prepared:
    x, residual = _random(*shape, device=device), _random(*shape, device=device)
    weight, inner = _random(shape[1], device=device), _random(shape[1], device=device) if has_inner else None

    def check(out: Tensors) -> list[Check]:
        addend = x if inner is None else rms_norm_reference(x, inner, EPS)
        wanted = (addend.float() + residual.float()).bfloat16()
        normed = rms_norm_reference(out[1].float(), weight, EPS)  # of what was written: a rounding may go the other way
        limit = ERROR_LIMIT * (2 if has_inner else 1)  # each part is rounded
        return [Check(got=out[0], wanted=normed, limit=ERROR_LIMIT), Check(got=out[1], wanted=wanted, limit=limit)]

    return Prepared(
        run=lambda: rms_norm_triton(x, weight, EPS, residual, inner=inner),
        check=check,
        num_bytes=4 * x.nbytes + weight.nbytes + (0 if inner is None else inner.nbytes),
        alone=lambda: [(rms_norm_triton(x, weight, EPS)[0][1:2], rms_norm_triton(x[1:2], weight, EPS)[0])],
    )


def _rotary(shape: Rows, device: torch.device) -> Prepared:
    source = _random(*shape, SIZE, device=device)
    x, tables = source.clone(), rotary_tables(shape[0], SIZE, device)
    cos, sin = (table[:, None] for table in tables)

    def run() -> Tensors:
        rotary_triton_(x, cos, sin)
        return (x,)

    def check(out: Tensors) -> list[Check]:
        wanted = rotary_reference(*(_ends(part).float() for part in (source, cos, sin)))
        return [Check(got=_ends(out[0]), wanted=wanted, limit=ERROR_LIMIT)]

    num_bytes = 2 * x.nbytes + cos.nbytes + sin.nbytes
    return Prepared(run=run, check=check, num_bytes=num_bytes, reset=lambda: x.copy_(source))


def _gated(shape: Rows, device: torch.device) -> Prepared:
    gate_up = _random(shape[0], 2 * shape[1], device=device)

    def check(out: Tensors) -> list[Check]:
        gate, up = _ends(gate_up).float().chunk(2, dim=-1)
        return [Check(got=_ends(out[0]), wanted=activated_product_reference(gate, up, "silu"), limit=ERROR_LIMIT)]

    return Prepared(
        run=lambda: (gated_activation_triton(gate_up, "silu"),), check=check, num_bytes=gate_up.nbytes * 3 // 2
    )


def _ends(x: torch.Tensor) -> torch.Tensor:
    """The first and the last rows; a short tensor's come twice."""
    return torch.cat([x[:CHECKED], x[-CHECKED:]])


def rotary_tables(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [T, D] of random angles, in bf16."""
    angles = torch.rand(rows, width // 2, device=device) * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
