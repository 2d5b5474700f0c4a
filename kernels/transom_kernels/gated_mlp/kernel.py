"""The Triton kernel of gated activations: out[t, n] = activation(gate_up[t, n]) * gate_up[t, N + n].

Legend: T tokens, N inner width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import gelu_tanh, silu


@triton.jit
def activate(gate_up, out, stride, N, limit, GELU: tl.constexpr, HAS_LIMIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute `BLOCK_N` elements of one row. `gate_up` is [T, 2 N], `out` [T, N]. The grid is (T, blocks of N)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    gate = tl.load(gate_up + row * stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    value = gelu_tanh(gate) if GELU else silu(gate)
    tl.store(out + row * N + n, (value * up).to(out.dtype.element_ty), mask=inside)
