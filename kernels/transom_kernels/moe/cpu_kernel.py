"""The kernels of an MoE layer's experts on CPUs: `gather_rows`, `gate_up` and `down_and_sum`, one after the other.

    gather_rows    copies the rows of x, sorted by expert, so that the rows of each expert are consecutive
    gate_up        computes the activations of these rows
    down_and_sum   multiplies them by `down` and adds up each token's weighted results, in the order of k

- pair: one token and one expert that it chose; pair t K + k is the k-th expert of token t.
- place: the number of a row among the sorted rows. Pairs of the same expert keep their order.
- slot: a candidate for an expert that has rows; there are min(P, E) slots. If there are more pairs than experts, each expert is a
  slot. Otherwise each place is a slot, and an expert is computed at its first place. Slots without rows are skipped. The number of
  work items thus follows from shapes alone, not from which experts were chosen.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs.
"""

from typing import Any

from transom_kernels.cpu.language import helper
from transom_kernels.cpu.rows import limited_gate, limited_up, make_gated
from transom_kernels.cpu.simd import (
    NUM_BYTES,
    STORE,
    float_argument,
    fma,
    load_f32,
    load_i64,
    load_scalar_f32,
    row_access,
    sigmoid,
    splat,
    store_f32,
    store_i64,
    tanh,
)
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, each_item, row_address, scratch
from transom_kernels.moe.cpu import DOWN, EXPERTS_PER_ITEM, GATHER, UP
from transom_kernels.moe.cpu_product import PANEL_BYTES, make_multiply

_GELU_SLOPE, _GELU_CUBIC = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the factor of x ** 3 in gelu_tanh


def make_gather_rows(dtype: str) -> Any:
    """Build the kernel that sorts and copies rows. The first P work items are pairs, the others EXPERTS_PER_ITEM experts each."""
    load, store, size = row_access(dtype)

    @helper
    def copy_row(x, factor, row, width, padded):
        """Copy a row times a factor, and pad it with zeros."""
        for n in range(0, width, LANES):
            store(row + n * size, load(x + n * size, width - n) * factor, width - n)
        for n in range(width, padded, LANES):
            store(row + n * size, splat(0.0), padded - n)

    @each_item
    def gather_rows(arguments, thread, item):
        experts, pairs = argument(arguments, GATHER.experts), argument(arguments, GATHER.num_pairs)
        if item >= pairs:
            begin = (item - pairs) * EXPERTS_PER_ITEM
            for expert in range(begin, min(begin + EXPERTS_PER_ITEM, argument(arguments, GATHER.num_experts))):
                first, count = _count(experts, pairs, expert)
                store_i64(argument(arguments, GATHER.pairs.first_of) + 8 * expert, first)
                store_i64(argument(arguments, GATHER.pairs.count_of) + 8 * expert, count)
            return
        expert = load_i64(experts + 8 * item)
        first, _ = _count(experts, pairs, expert)
        _, earlier = _count(experts, item, expert)
        place = first + earlier
        store_i64(argument(arguments, GATHER.pairs.places) + 8 * item, place)
        store_i64(argument(arguments, GATHER.pairs.expert_at) + 8 * place, expert if earlier == 0 else -1)
        x = row_address(arguments, GATHER.x, item // argument(arguments, GATHER.num_chosen))
        width, columns = argument(arguments, GATHER.width), argument(arguments, GATHER.columns)
        weights = argument(arguments, GATHER.weights)
        factor = splat(load_scalar_f32(weights + 4 * item)) if weights != 0 else splat(1.0)
        copy_row(x, factor, argument(arguments, GATHER.rows) + place * columns * size, width, columns)

    return gather_rows


@helper
def _count(experts, pairs, expert):
    """Return how many of the first `pairs` pairs have a lower expert number, and how many have this expert."""
    smaller, equal = 0, 0
    for pair in range(pairs):
        other = load_i64(experts + 8 * pair)
        smaller += other < expert
        equal += other == expert
    return smaller, equal


def _make_multiply_expert(kind: str, dtype: str, at: Any) -> Any:
    """Build multiply_expert(arguments, slot, panel, memory, sums, by_place): multiply the rows of a slot's expert by a panel of it.

    It returns the expert, its first place and its number of rows, which is 0 if no pair has that expert. The products [rows, 64]
    are stored from `sums` on, or with `by_place` from row `first place` of `sums` on. `at` names the words of `MatrixArguments`.
    """
    multiply = make_multiply(kind, dtype)

    @helper
    def multiply_expert(arguments, slot, panel, memory, sums, by_place):
        expert = slot
        if argument(arguments, at.slots_are_places) != 0:
            expert = load_i64(argument(arguments, at.pairs.expert_at) + 8 * slot)
        if expert < 0:
            return 0, 0, 0
        first = load_i64(argument(arguments, at.pairs.first_of) + 8 * expert)
        count = load_i64(argument(arguments, at.pairs.count_of) + 8 * expert)
        if count > 0:
            number = expert * argument(arguments, at.num_panels) + panel
            weight = argument(arguments, at.panels) + number * argument(arguments, at.panel_bytes)
            row_bytes = argument(arguments, at.row_bytes)
            rows = argument(arguments, at.rows) + first * row_bytes
            own_sums = sums + first * PANEL_BYTES if by_place else sums
            multiply(rows, row_bytes, count, weight, argument(arguments, at.units), own_sums, memory)
        return expert, first, count

    return multiply_expert


@helper
def _bias_of(arguments, at, expert, panel):
    """Return the address of a panel's biases, or 0 if there are none."""
    bias = argument(arguments, at.bias)
    return bias + (expert * argument(arguments, at.num_panels) + panel) * PANEL_BYTES if bias else 0


def make_gate_up(kind: str, dtype: str, activation: str) -> Any:
    """Build the kernel of activations. A work item is one panel of a slot's expert: 32 activations of all its rows, or 64 without
    gates.

    Scratch: 64 bytes for AMX, and 256 for the sums of each pair and of 15 spare rows.
    """
    store, size = STORE[dtype], NUM_BYTES[dtype]
    multiply_expert = _make_multiply_expert(kind, dtype, UP.matrix)
    is_silu, has_gates = activation == "silu", activation != "relu2"
    most = 2 if has_gates else 4  # vectors of activations of a panel
    squared = make_gated("relu2")

    @helper
    def active(gate, gain):
        if is_silu:
            return gate * sigmoid(gain * gate)
        inner = splat(_GELU_SLOPE) * fma(gate * gate * gate, splat(_GELU_CUBIC), gate)
        return splat(0.5) * gate * (splat(1.0) + tanh(inner))

    @each_item
    def gate_up(arguments, thread, item):
        panels = argument(arguments, UP.matrix.num_panels)
        slot, panel = item // panels, item % panels
        sums = scratch(thread) + 64
        expert, first, count = multiply_expert(arguments, slot, panel, scratch(thread), sums, False)
        bias = _bias_of(arguments, UP.matrix, expert, panel)
        gain, offset = splat(float_argument(arguments, UP.gain)), splat(float_argument(arguments, UP.up_offset))
        has_limits = argument(arguments, UP.has_limits) != 0
        gate_limit, up_limit = float_argument(arguments, UP.gate_limit), float_argument(arguments, UP.up_limit)
        columns, column = argument(arguments, UP.columns), panel * most * LANES
        parts = most if has_gates else min(most, (columns - column) // LANES)
        out = argument(arguments, UP.activations) + (first * columns + column) * size
        for row in range(count):
            for part in range(parts):
                place = out + (row * columns + part * LANES) * size
                if has_gates:
                    at, of_bias = sums + row * PANEL_BYTES + part * 128, bias + part * 128
                    gate, up = load_f32(at), load_f32(at + 64)
                    if bias != 0:
                        gate, up = gate + load_f32(of_bias), up + load_f32(of_bias + 64)
                    if has_limits:
                        gate, up = limited_gate(gate, gate_limit), limited_up(up, up_limit)
                    store(place, active(gate, gain) * (up + offset))
                else:
                    up = load_f32(sums + row * PANEL_BYTES + part * 64)
                    if bias != 0:
                        up = up + load_f32(bias + part * 64)
                    store(place, squared(up, up))

    return gate_up


def make_down_and_sum(kind: str, dtype: str) -> Any:
    """Build the kernel of results. A work item is one panel of every expert: 64 outputs of all tokens. Scratch: as `gate_up`."""
    _, store, size = row_access(dtype)
    multiply_expert = _make_multiply_expert(kind, dtype, DOWN.matrix)

    @each_item
    def down_and_sum(arguments, thread, panel):
        sums = scratch(thread) + 64
        # each expert's products
        for slot in range(argument(arguments, DOWN.num_slots)):
            expert, first, count = multiply_expert(arguments, slot, panel, scratch(thread), sums, True)
            bias = _bias_of(arguments, DOWN.matrix, expert, panel)
            if bias != 0:
                for at in range(0, count * PANEL_BYTES, 64):
                    place = sums + first * PANEL_BYTES + at
                    store_f32(place, load_f32(place) + load_f32(bias + at % PANEL_BYTES))
        # each token's sum
        num_chosen, width = argument(arguments, DOWN.num_chosen), argument(arguments, DOWN.width)
        places, weights = argument(arguments, DOWN.matrix.pairs.places), argument(arguments, DOWN.weights)
        for token in range(argument(arguments, DOWN.num_tokens)):
            for part in range(min(4, (width - panel * 64 + LANES - 1) // LANES)):
                total = splat(0.0)
                for pair in range(token * num_chosen, (token + 1) * num_chosen):
                    place = load_i64(places + 8 * pair)
                    factor = splat(load_scalar_f32(weights + 4 * pair)) if weights != 0 else splat(1.0)
                    total = fma(factor, load_f32(sums + place * PANEL_BYTES + part * 64), total)
                column = panel * 64 + part * LANES
                out = argument(arguments, DOWN.out) + (token * width + column) * size
                store(out, total, width - column)

    return down_and_sum
