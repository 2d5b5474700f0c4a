"""A row has the same bits alone as in a batch and for any number of threads, and NaN stays in its row: every CPU operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.test_latent_attention import latent_inputs
from tests.kernels.test_linear_recurrence import batch_of, own_caches, recurrence_case, rows_of, tokens_of
from tests.kernels.test_lora import lora_weights
from tests.kernels.test_moe_cpu import GPT_OSS, mx_experts, plain_experts, routes
from tests.kernels.test_sample_cpu import random_params, sample_cpu, some_rows
from transom_kernels import layer_norm as layer_norm_kernel
from transom_kernels.gated_mlp import gated_activation, op as gated_mlp_kernel
from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre
from transom_kernels.kv_write import Preparation, QkvInputs
from transom_kernels.kv_write.cpu import prepare_qkv_cpu
from transom_kernels.latent_attention.cpu import latent_attention_cpu
from transom_kernels.layer_norm import layer_norm
from transom_kernels.linear import linear, pack_weight
from transom_kernels.linear_recurrence import gated_rms_norm
from transom_kernels.linear_recurrence.cpu.recurrence import linear_recurrence_cpu
from transom_kernels.logprobs import logprobs
from transom_kernels.lora import add_lora_
from transom_kernels.lora.cpu import BLOCK_ROWS
from transom_kernels.moe import moe, pack_experts
from transom_kernels.quantised_linear import Format, pack, quantise
from transom_kernels.rms_norm import op as rms_norm_kernel, rms_norm
from transom_kernels.rotary import rotary_, rotary_tables
from transom_kernels.route import Routing, route
from transom_kernels.route.cpu import TILE

EPS = 1e-5
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Rows:
    """`compute(rows)` gives an operator's results for a slice of the rows of `x`."""

    x: torch.Tensor
    compute: Callable[[slice], Sequence[torch.Tensor]]
    passes_nan: bool = True  # whether a NaN in a row of `x` makes NaN in that row of some result


def norms() -> Rows:
    num_rows = 3 * (rms_norm_kernel.ITEM_ELEMENTS // 100) + 1
    x, residual, weight = torch.randn(num_rows, 100), torch.randn(num_rows, 100), torch.randn(100)
    return Rows(x, lambda rows: rms_norm(x[rows], weight, EPS, residual[rows]))


def layer_norms() -> Rows:
    x, weight = torch.randn(2 * (layer_norm_kernel.ITEM_ELEMENTS // 100) + 1, 100), torch.randn(100)
    return Rows(x, lambda rows: [layer_norm(x[rows], weight, EPS)])


def activations() -> Rows:
    x = torch.randn(7, 2 * gated_mlp_kernel.ITEM_ELEMENTS + 34)
    return Rows(x, lambda rows: [gated_activation(x[rows], "silu")])


def rotations() -> Rows:
    """Of more heads than an item has, and of narrower tables."""
    x, positions = torch.randn(40, 60, 50), torch.randint(0, 5000, (40,))
    frequency, sign = torch.rand(48), torch.ones(48)

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        tables, turned = rotary_tables(positions[rows], frequency, sign, F32), x[rows].clone()
        rotary_(turned, *tables)
        return [*tables, turned]

    return Rows(x, compute)


def keys_and_values() -> Rows:
    """Of more heads than an item has; with what lands in the cache."""
    x, tables = torch.randn(9, 60, 100), (torch.randn(9, 100), torch.randn(9, 100))

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        q, k, v = x[rows].split_with_sizes((40, 10, 10), dim=1)
        caches, slots = empty_caches(Shape(kv_heads=10, size=100), 3), torch.arange(9)[rows]
        inputs = QkvInputs(
            q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1], slots=slots,
            tables=(tables[0][rows], tables[1][rows]), preparation=Preparation(norm=True, value_norm=True),
        )  # fmt: skip
        return [prepare_qkv_cpu(inputs), *(cache[slots // 4, slots % 4] for cache in caches)]

    return Rows(x, compute)


def products(dtype: torch.dtype) -> Rows:
    x, weight = torch.randn(80, 576).to(dtype), pack_weight((torch.randn(50, 576) / 24).to(dtype))
    return Rows(x, lambda rows: [linear(x[rows], weight, soft_cap=2.0)])


def adapters(dtype: torch.dtype) -> Rows:
    """Of more rows than a block, with all slots in turn."""
    x, weights = torch.randn(BLOCK_ROWS + 9, 100).to(dtype), lora_weights(100, (0, 150, 163, 170), 8, dtype)
    y, slots = torch.randn(len(x), 170).to(dtype), torch.arange(len(x), dtype=torch.int32) % len(weights.a)

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        out = y[rows].clone()
        add_lora_(out, x[rows], slots[rows], weights)
        return [out]

    return Rows(x, compute)


def quantised_products(kind: Format) -> Rows:
    x, weight = torch.randn(150, 100), pack(quantise(torch.randn(700, 100), kind))
    return Rows(x, lambda rows: [linear(x[rows], weight), linear(x[rows], weight, soft_cap=5.0)])


def router() -> Rows:
    x, weight, routing = torch.randn(TILE + 1, 300).bfloat16(), torch.randn(20, 300), Routing(num_chosen=3)
    return Rows(x, lambda rows: route(x[rows], weight, routing))


def experts(form: str) -> Rows:
    """Few and many rows of an expert, more and fewer pairs than experts."""
    dtype = F32 if form == "float32" else BF16
    tensors = mx_experts(4, 64, 2080) if form == "mxfp4" else plain_experts(4, 20, 2080, dtype)
    packed, x, (which, weights) = pack_experts(tensors), torch.randn(40, 2080).to(dtype) / 16, routes(40, 2, 4)
    which[:, 0] = 3
    which[:, 1] %= 3
    return Rows(x, lambda rows: [moe(x[rows], which[rows], weights[rows], packed, GPT_OSS)])


def hyper_connections() -> Rows:
    x, y, projected_all = torch.randn(9, 4, 70), torch.randn(9, 70), torch.randn(9, 24)
    scale, base = torch.rand(24), torch.randn(24)

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        projected = projected_all[rows]
        hidden, post, mix = hc_pre(x[rows], projected, scale, base, rounds=20, eps=EPS)
        head = hc_head(x[rows], projected[:, :4].contiguous(), scale[:4], base[:4], eps=EPS)
        return [hc_norm(x[rows], EPS), hidden, post, mix, hc_post(y[rows], x[rows], post, mix), head]

    return Rows(x, compute)


def latent_queries(dtype: torch.dtype) -> Rows:
    inputs = latent_inputs(5, 90, 150, dtype=dtype)

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        own = {name: getattr(inputs, name)[rows] for name in ("q", "window_slots", "entry_slots")}
        return [latent_attention_cpu(replace(inputs, **own))]

    return Rows(inputs.q, compute, passes_nan=False)


def recurrences(kind: str) -> Rows:
    """A token of each of some sequences, which read a state."""
    case = recurrence_case(kind, (4, 2, 12, 70, 4), [(0, 1)] * 12)
    case.state.normal_()
    rows_of(case).normal_()

    def compute(rows: slice) -> Sequence[torch.Tensor]:
        batch = batch_of([1] * len(case.projected[rows]))
        batch.read_block, batch.write_block = case.batch.write_block[rows] - 1, case.batch.write_block[rows]
        inputs = own_caches(replace(case, batch=batch, **tokens_of(case, rows)))
        out, written = linear_recurrence_cpu(inputs), batch.write_block.long()
        return [out, inputs.state[written], rows_of(inputs)[written]]

    return Rows(case.projected, compute)


def gated_norms() -> Rows:
    x, weight = torch.randn(60, 120), torch.randn(40)
    return Rows(x, lambda rows: [gated_rms_norm(x[rows], x[rows] + 1, weight, EPS, group=40)])


def log_probabilities() -> Rows:
    logits, chosen = torch.randn(6, 20_000), torch.arange(6)
    return Rows(logits, lambda rows: logprobs(logits[rows], chosen[rows], 5), passes_nan=False)


def samples() -> Rows:
    logits, params = torch.randn(24, 20_000), random_params(24, 20_000)
    return Rows(logits, lambda rows: [sample_cpu(logits[rows], some_rows(params, rows))], passes_nan=False)


OPERATORS: dict[str, Callable[[], Rows]] = {
    "norms": norms,
    "layer norms": layer_norms,
    "activations": activations,
    "rotations": rotations,
    "keys and values": keys_and_values,
    "products in float32": lambda: products(F32),
    "products in bfloat16": lambda: products(BF16),
    "products in int8": lambda: quantised_products("int8"),
    "products in int8 with minima": lambda: quantised_products("int8_min"),
    "products in int4": lambda: quantised_products("int4"),
    "products in int4 with minima": lambda: quantised_products("int4_min"),
    "adapters in float32": lambda: adapters(F32),
    "adapters in bfloat16": lambda: adapters(BF16),
    "router": router,
    "experts in float32": lambda: experts("float32"),
    "experts in bfloat16": lambda: experts("bfloat16"),
    "experts in MXFP4": lambda: experts("mxfp4"),
    "hyper-connections": hyper_connections,
    "latent attention in float32": lambda: latent_queries(F32),
    "latent attention in bfloat16": lambda: latent_queries(BF16),
    "gated delta rule": lambda: recurrences("delta"),
    "Mamba-2": lambda: recurrences("mamba2"),
    "Mamba-1": lambda: recurrences("mamba1"),
    "gated norms": gated_norms,
    "log-probabilities": log_probabilities,
    "samples": samples,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_has_the_same_bits_in_any_batch_and_for_any_number_of_threads(name: str) -> None:
    operator = OPERATORS[name]()
    num_rows, whole = len(operator.x), operator.compute(slice(None))
    spans = ((0, 1), (num_rows - 1, num_rows), (num_rows // 2, num_rows // 2 + 1), (1, 5), (0, num_rows // 2))
    for first, last in spans:
        alone = operator.compute(slice(first, last))
        assert all(one.equal(every[first:last]) for one, every in zip(alone, whole, strict=True)), (first, last)
    assert all(len(part) == 0 for part in operator.compute(slice(0, 0)))
    for num_threads in (1, 3):
        with kernel_threads(num_threads):
            again = operator.compute(slice(None))
        assert all(one.equal(other) for one, other in zip(again, whole, strict=True)), num_threads


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_number_that_is_none_stays_in_its_row(name: str, bad: float) -> None:
    operator = OPERATORS[name]()
    whole = operator.compute(slice(None))
    kept = torch.arange(len(operator.x)) != 1
    operator.x[1].view(-1)[3] = bad
    got = operator.compute(slice(None))
    assert all(one[kept].equal(every[kept]) for one, every in zip(got, whole, strict=True))
    if operator.passes_nan and bad != bad:
        assert any(bool(part[1].isnan().any()) for part in got)
