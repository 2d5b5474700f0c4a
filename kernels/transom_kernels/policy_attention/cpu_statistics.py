"""What the CPU kernels of `policy_attention` leave of a row's softmax for `add_mass`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import LOAD_SCALAR, LOG2_E, exp2, splat, store_scalar_f32
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import SINK_LOGITS, SINK_STRIDE
from transom_kernels.paged_attention.cpu_inner_loops import first_lane
from transom_kernels.policy_attention.cpu_arguments import STATISTICS


def make_store_statistics(sink_dtype: str | None) -> Any:
    """store_statistics(arguments, row, head, top, weight_sum, heads): a head's maximum and sum, if they are wanted.

    The sink logit joins them. `heads` counts the query heads of a row.
    """
    has_sink, load_sink = sink_dtype is not None, LOAD_SCALAR[sink_dtype or "f32"]
    log2_e = np.float32(LOG2_E)

    @njit
    def store_statistics(arguments, row, head, top, weight_sum, heads):
        out = argument(arguments, STATISTICS)
        if out == 0:
            return
        if has_sink:
            sink = load_sink(argument(arguments, SINK_LOGITS) + head * argument(arguments, SINK_STRIDE)) * log2_e
            joint = max(top, sink)
            weight_sum = weight_sum * first_lane(exp2(splat(top - joint))) + first_lane(exp2(splat(sink - joint)))
            top = joint
        store_scalar_f32(out + 8 * (row * heads + head), top)
        store_scalar_f32(out + 8 * (row * heads + head) + 4, weight_sum)

    return store_statistics
