"""Every kernel in every configuration that is launched: the launchers run, and what they launch is recorded instead.

Sizes are those of real models; contents are of no account. `ahead_of_time.py` compiles what is found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.kernels.test_linear_recurrence import recurrence_case, step_of
from tests.kernels.test_lora import lora_weights
from tests.kernels.test_moe_cpu import GPT_OSS, RELU2, biased, mx_experts, plain_experts, routes, without_gates
from tests.kernels.test_policy_attention import PolicySequence, make_policy_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, poisoned_caches, quantised
from tests.kernels.test_quantised_linear_triton import quantised_rows
from tests.kernels.test_sample_cpu import params_of
from tests.kernels.test_short_convolution import convolution_case
from transom_kernels import launch
from transom_kernels.all_reduce.gpu import PeerMemory, one_shot_all_reduce_
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.gated_mlp.gpu import gated_activation_triton
from transom_kernels.hyper_connections.gpu import hc_head_triton, hc_norm_triton, hc_post_triton, hc_pre_triton
from transom_kernels.kv_write import Preparation, QkvInputs
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.reference import LatentInputs
from transom_kernels.linear_recurrence.gpu import gated_rms_norm_triton, linear_recurrence_triton
from transom_kernels.linear_recurrence.inputs import GatedNorm
from transom_kernels.lora.gpu import add_lora_triton_
from transom_kernels.moe.gpu import dense_triton, moe_triton
from transom_kernels.moe.gpu_weights import arranged, for_gpu
from transom_kernels.moe.row_blocks import block_rows_triton
from transom_kernels.paged_attention.triton import launcher as paged_launcher
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton
from transom_kernels.policy_attention.triton.launcher import add_block_mass_triton, policy_attention_triton
from transom_kernels.rms_norm.gpu import rms_norm_triton
from transom_kernels.rotary.gpu import rotary_triton_
from transom_kernels.route import Routing
from transom_kernels.route.gpu import FEW_TOKENS, route_triton
from transom_kernels.sample.gpu import best_of_slice_triton, sample_triton
from transom_kernels.short_convolution.gpu import short_convolution_triton

BF16, F16, F32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
FP8 = "fp8e4nv"  # from sm_89 on
TYPES = {
    BF16: "bf16", F16: "fp16", F32: "fp32", torch.float8_e4m3fn: FP8, torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32",
    torch.int16: "i16", INT64: "i64", torch.float64: "fp64",
}  # fmt: skip
STRIDES_OF_BLOCKS = ("stride_b", "source_stride", "target_stride")  # beyond 32 bits in a real cache
SHARED_BYTES = {10 * major + minor: num_bytes for (major, minor), num_bytes in launch.SHARED_BYTES.items()}
HELD = ("int4 128", "int4 128 zeros", "int4 32", "int4 32 zeros", "int8 rows", "fp8 128", "fp4 16", "fp4 32")
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))  # of keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A kernel, its arguments' types and constants, and how it is launched."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    unaligned: frozenset[str]  # arguments that are no multiples of 16
    options: dict[str, int]  # warps, pipeline stages, registers

    @property
    def name(self) -> str:
        kinds = dict.fromkeys(kind.removeprefix("*") for kind in self.types.values() if kind.startswith("*"))
        constants = " ".join(f"{name.lower()} {value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__} {' '.join(kinds)} {constants} warps {self.options.get('num_warps', 4)}"


def all_cases(arch: int) -> list[Compilation]:
    """What all calls launch on a device of compute capability `arch`, each configuration once."""
    found: dict[str, Compilation] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        case = compilation(kernel, args, kwargs)
        if arch >= 89 or not any(FP8 in kind for kind in case.types.values()):
            found.setdefault(f"{case.name} {case.options}", case)

    paged_launcher._layers.clear()  # prepared for another device
    with patch.object(JITFunction, "run", record), patch.object(launch, "_pretended", divmod(arch, 10)):
        for call in calls():
            call()
    return list(found.values())


def compilation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
    options: dict[str, int] = {
        name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs
    }
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    types, unaligned = {}, set()
    for param in kernel.params:
        value = given[param.name]
        if param.is_constexpr:
            continue
        if isinstance(value, int) and value == 1 and not param.do_not_specialize:  # Triton makes it a constant
            constants[param.name] = value
            continue
        if isinstance(value, torch.Tensor):
            types[param.name] = f"*{TYPES[value.dtype]}"
            is_aligned = True
        else:
            is_large = param.name.endswith(STRIDES_OF_BLOCKS)
            types[param.name] = "fp32" if isinstance(value, float) else "i64" if is_large else "i32"
            is_aligned = value % 16 == 0
        if param.do_not_specialize or not is_aligned:
            unaligned.add(param.name)
    return Compilation(kernel=kernel, types=types, constants=constants, unaligned=frozenset(unaligned), options=options)


def calls() -> Iterator[Callable[[], Any]]:
    yield from attention_calls()
    yield from policy_calls()
    yield from small_calls()
    yield from prepare_calls()
    yield from (partial(product_of, kind, tokens) for kind, tokens in product(HELD, (1, 64, 256)))
    yield from expert_calls()
    yield from latent_calls()
    yield from route_calls()
    for units, dtype, bias in product((64, 128), (BF16, F32), (False, True)):  # LFM2 350M's channels and 1.2B's
        yield partial(short_convolution_triton, convolution_case(3, 16, units=units, bias=bias, dtype=dtype)[1])
    for rows, (rank, dtype) in product((1, 256), ((8, BF16), (16, BF16), (256, BF16), (16, F16), (64, F32))):
        yield partial(adapters, rows, rank, dtype)
    yield from recurrence_calls()
    yield partial(sample_triton, torch.empty(4, 128_256), params_of(4, **changes()))
    yield partial(best_of_slice_triton, torch.empty(4, 16_032), torch.ones(4), torch.arange(4), 16_032)
    for dtype, size, width in ((BF16, 4, 4096), (BF16, 4, 7168), (F32, 4, 7168), (BF16, 3, 2880)):
        yield partial(hyper_connections, torch.empty(2, size, width, dtype=dtype))


def changes() -> dict[str, Any]:
    ids, numbers = torch.zeros(3, dtype=INT64), torch.zeros(3)
    return {"change_row": ids, "change_id": ids, "change_factor": numbers, "change_minus": numbers}


def attention_calls() -> Iterator[Callable[[], Any]]:
    """A token, a few and a prompt, of 8 to 32 query heads a KV head. 99 KiB hold no float32 tiles of 512 numbers and more."""
    has_room = launch.shared_bytes(torch.device("cpu")) > 128 << 10
    for size, v_size in WIDTHS:
        for group, dtype in ((8, BF16), (16, BF16), (8, F32), (32, F32)):
            sinks = torch.zeros(2 * group) if group > 8 else None
            if dtype is F32 and size * group > 512 * 8 and not has_room:
                continue
            yield partial(attention, size, v_size, dtype, group, sink_logits=sinks)
        for kv_format in FORMATS_BY_NAME if size < 512 else ():
            yield partial(attention, size, v_size, BF16, 8, kv_format)
    for group, dtype in ((16, BF16), (10, BF16), *[(16, F32)] * has_room):  # MLA: 512 numbers and 64 rotated ones
        yield partial(attention, 576, 512, dtype, group)
    for size, v_size in ((192, 128), (256, 256)):  # MLA's prompts, expanded: DeepSeek V3 and GLM-4.7-Flash
        yield partial(attention, size, v_size, BF16, 1)
    for options in ({"window": 128, "num_sink_tokens": 4, "chunk": 8192, "soft_cap": 3.0}, {"window": 128}):
        for dtype, width in ((BF16, 128), (F16, 64)):
            yield partial(attention, width, width, dtype, 8, sink_logits=torch.zeros(16), **options)


def attention(size: int, v_size: int, dtype: torch.dtype, group: int, kv_format: str = "", **options: Any) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, size=size, v_size=v_size, block_size=16, dtype=dtype)
    case = make_case([Sequence(start=1100, count=1), Sequence(start=40, count=4), Sequence(start=0, count=20)], shape)
    caches = quantised(case, FORMATS_BY_NAME[kv_format]).arguments if kv_format else {}
    paged_attention_triton(case.inputs(**caches, **options))


def policy_calls() -> Iterator[Callable[[], Any]]:
    for dtype, width in ((BF16, 64), (BF16, 80), (BF16, 128), (BF16, 256), (F32, 64), (F32, 128)):
        yield partial(policy, width, dtype)
        yield partial(policy, width, dtype, has_all=True)
    for kv_format, width in product(FORMATS_BY_NAME, (64, 80, 128, 256)):
        yield partial(policy, width, BF16, kv_format, has_all=True)


def policy(width: int, dtype: torch.dtype, kv_format: str = "", *, has_all: bool = False) -> None:
    shape = Shape(heads=16, kv_heads=2, size=width, block_size=16, dtype=dtype)
    case = make_policy_case([PolicySequence(start=40), PolicySequence(start=40, count=9)], shape)
    options = quantised(case, FORMATS_BY_NAME[kv_format]).arguments if kv_format else {}
    if has_all:
        options |= {"soft_cap": 3.0, "sink_logits": torch.zeros(16), "sink_q": case.sink_q}
    inputs = case.inputs(**options, statistics=torch.zeros(10, 16, 2))
    policy_attention_triton(inputs if has_all else case.inputs(**options))
    add_block_mass_triton(torch.zeros(case.batch.block_table.shape), inputs)


def small_calls() -> Iterator[Callable[[], Any]]:
    for width in (576, 2880, 4096, 8192):
        x, weight = torch.empty(2, width, dtype=BF16), torch.empty(width, dtype=BF16)
        yield partial(rms_norm_triton, x, weight, 1e-5, x.clone())
    yield partial(rms_norm_triton, torch.empty(2, 4096, dtype=BF16), torch.empty(4096, dtype=BF16), 1e-5)
    for width, has_weight in ((1152, True), (5376, True), (5120, False)):
        x, wide = torch.empty(2, width, dtype=BF16), torch.empty(width)
        yield partial(rms_norm_triton, x, wide if has_weight else None, 1e-5, x.clone(), inner=wide)
    heads, tables = torch.empty(2, 40, 128, dtype=BF16), torch.empty(2, 1, 128, dtype=BF16)
    for interleaved in (False, True):
        yield partial(rotary_triton_, heads, tables, tables, interleaved=interleaved)
    for activation, limits in (("silu", None), ("gelu_tanh", None), ("silu", (7.0, 7.0)), ("relu2", None)):
        yield partial(gated_activation_triton, torch.empty(2, 8192, dtype=BF16), activation, limits)
    blocks = torch.empty(4, 4096, dtype=torch.uint8)
    yield partial(copy_blocks_triton, blocks, blocks.clone(), [(0, 1), (2, 3)])
    for size, dtype in product((2, 3, 8), (BF16, F32)):
        memory = PeerMemory.of(1, [0] * size, blocks.device)
        yield partial(one_shot_all_reduce_, torch.empty(2, 4096, dtype=dtype), memory)


def prepare_calls() -> Iterator[Callable[[], Any]]:
    normed = Preparation(norm=True)
    yield from (partial(prepare_latent, heads, dtype) for heads, dtype in product((16, 128), (BF16, F32)))
    for kv_format in ("", *FORMATS_BY_NAME):
        yield partial(prepare, 32, 8, 128, normed, kv_format=kv_format)
    for width in (64, 80, 128, 256):
        yield partial(prepare, 32, 8, width, Preparation(hadamard=True), kv_format="int4")
    yield partial(prepare, 64, 8, 64, Preparation())
    for heads, kv_heads, width in ((8, 4, 256), (32, 4, 512)):
        yield partial(prepare, heads, kv_heads, width, Preparation(norm=True, value_norm=True), norms=F32)
    yield partial(prepare, 40, 8, 128, Preparation(norm_after_rotation=True))
    yield partial(prepare, 40, 8, 128, Preparation(), rotated=0, query_scale=torch.empty(2, dtype=BF16))
    latent = Preparation(norm=True, interleaved=True, rotates_last=True)
    yield partial(prepare, 64, 1, 512, latent, rotated=64, has_values=False)
    for width in (128, 512):  # entries of compressors
        yield partial(prepare, 0, 1, width, latent, dtype=F32, norms=F32, rotated=64, has_values=False)
    for width in (128, 512, 1024):  # a compressor's state
        yield partial(prepare, 0, 1, width, Preparation(), dtype=F32, cache=F32, rotated=0)


def prepare_latent(heads: int, dtype: torch.dtype) -> None:
    """MLA's rows of 512 numbers and 64 rotated ones, and its queries of 128 and 64."""
    row, cache, queries = (torch.empty(shape, dtype=dtype) for shape in ((2, 1, 576), (2, 16, 1, 576), (2, heads, 192)))
    shared: Any = {"slots": torch.zeros(2, dtype=INT64), "tables": (torch.empty(2, 64, dtype=dtype),) * 2}
    how, rotated, latents = Preparation(interleaved=True), row[..., 512:], row[..., :512]
    caches: Any = {"k_cache": cache[..., 512:], "v_cache": cache[..., :512]}
    prepare_qkv_triton(QkvInputs(q=rotated[:, :0], k=rotated, v=latents, preparation=how, **caches, **shared))
    prepare_qkv_triton(QkvInputs(q=queries, preparation=replace(how, rotates_last=True), **shared))


def prepare(
    heads: int,
    kv_heads: int,
    width: int,
    how: Preparation,
    *,
    dtype: torch.dtype = BF16,
    cache: torch.dtype = BF16,
    norms: torch.dtype = BF16,
    kv_format: str = "",
    rotated: int | None = None,
    has_values: bool = True,
    query_scale: torch.Tensor | None = None,
) -> None:
    rows = [torch.empty(2, count, width, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    if how.norm:
        q_weight, k_weight = (torch.empty(count, width, dtype=norms) for count in (heads, kv_heads))
        how = Preparation(
            norm=True, q_weight=q_weight if has_values else None, k_weight=k_weight, value_norm=how.value_norm,
            interleaved=how.interleaved, rotates_last=how.rotates_last,
        )  # fmt: skip
    caches: dict[str, Any] = {name: torch.empty(2, 16, kv_heads, width, dtype=cache) for name in ("k_cache", "v_cache")}
    if kv_format:
        caches = poisoned_caches(FORMATS_BY_NAME[kv_format], 2, 16, kv_heads, (width, width)).arguments
    if not has_values:
        rows[2], caches["v_cache"] = None, None  # type: ignore[call-overload]
    tables = None if rotated == 0 else (torch.empty(2, rotated or width, dtype=BF16),) * 2
    prepare_qkv_triton(
        QkvInputs(
            q=rows[0], k=rows[1], v=rows[2], slots=torch.zeros(2, dtype=INT64), tables=tables, preparation=how,
            query_scale=query_scale, **caches,
        )
    )  # fmt: skip


def product_of(kind: str, tokens: int) -> None:
    """A linear layer over a quantised weight."""
    dense_triton(torch.empty(tokens, 1024, dtype=BF16), arranged([quantised_rows(kind, 512, 1024)]), None, BF16)


def expert_calls() -> Iterator[Callable[[], Any]]:
    for tokens, dtype, is_mx in product((1, 64, 256), (BF16, F32), (False, True)):
        tensors = mx_experts(4, 64, 96) if is_mx else plain_experts(4, 64, 96, dtype)
        x, gated = torch.empty(tokens, 96, dtype=dtype), biased(tensors, dtype, interleaved=is_mx)
        for these, rule in ((without_gates(tensors), RELU2), (gated, GPT_OSS)):
            yield partial(moe_triton, x, *routes(tokens, 4, 4), for_gpu(these), rule)
    for experts in (8, 32, 256):
        yield partial(block_rows_triton, torch.zeros(50, dtype=INT64), experts, 16)


def latent_calls() -> Iterator[Callable[[], Any]]:
    """In V4's own widths, and MLA's; ranks share their heads."""
    slots = torch.zeros(2, 7, dtype=INT64)
    for width, heads, dtype in [*product((512, 576), (8, 16, 32, 64, 128), (BF16, F32)), (128, 16, F32)]:
        inputs = LatentInputs(
            q=torch.empty(2, heads, width, dtype=dtype), window_cache=torch.empty(2, 16, 1, width, dtype=dtype),
            window_slots=slots, entry_cache=torch.empty(2, 4, 1, width, dtype=dtype), entry_slots=slots,
            sink_logits=torch.empty(heads), scale=0.2,
        )  # fmt: skip
        yield partial(latent_attention_triton, inputs)
        yield partial(latent_attention_triton, replace(inputs, counts=[2]))
    for dtype in (BF16, F32):
        q, keys = torch.empty(2, 64, 128, dtype=dtype), torch.empty(2, 4, 1, 128, dtype=dtype)
        visible = torch.zeros(2, dtype=INT64)
        yield partial(select_entries_triton, q, torch.empty(2, 64), keys, slots, visible, visible, top_k=4, scale=0.2)
    for groups, ratio in ((1, 128), (2, 4)):
        cache, entries = torch.empty(2, 4, 1, 512 * groups), torch.zeros(2, groups * ratio, dtype=INT64)
        yield partial(pool_rows_triton, cache, cache, entries, torch.empty(ratio, 512 * groups))


def route_calls() -> Iterator[Callable[[], Any]]:
    for experts, chosen, width in ((8, 2, 4096), (32, 4, 2880), (128, 8, 4096), (256, 6, 4096), (512, 10, 7168)):
        weight, some = torch.empty(width, experts).T, torch.empty(experts)
        for dtype, tokens in product((BF16, F32), (1, FEW_TOKENS + 1)):
            x, plain = torch.empty(tokens, width, dtype=dtype), Routing(num_chosen=chosen)
            scaled = Routing(num_chosen=chosen, score="sqrt_softplus")
            fixed = torch.zeros(tokens, chosen, dtype=INT64)
            yield partial(route_triton, x, weight, plain, bias=some, expert_scale=some)
            yield partial(route_triton, x, weight, scaled, bias=some, expert_scale=some, correction=some)
            yield partial(route_triton, x, weight, scaled, bias=some, expert_scale=some, chosen=fixed)
    # --- DeepSeek V2's and V3's groups; last, so compiled every day ---
    x, some = torch.empty(1, 7168, dtype=BF16), torch.empty(256)
    for score, given in (("softmax", None), ("sigmoid", some)):
        groups = Routing(num_chosen=8, score=score, num_groups=8, top_groups=4)  # type: ignore[arg-type]
        yield partial(route_triton, x, torch.empty(7168, 256).T, groups, correction=given)


def recurrence_calls() -> Iterator[Callable[[], Any]]:
    """Gated delta nets of Qwen and Kimi Linear; Mamba of Nemotron, Granite, Falcon-H1 and Jamba; norms of their outputs."""
    mamba2 = (64, 8, 128, 64), (24, 1, 256, 128), (24, 1, 64, 32)
    sizes = (
        ("delta", (32, 16, 128, 128)),
        *(("kda", (32, 32, 128, 128)), ("bounded kda", (32, 32, 128, 128))),
        *product(("mamba2",), mamba2),
        ("mamba1", (128, 1, 16, 64)),
    )
    for (kind, heads), dtype in product(sizes, (BF16, F32)):
        case = recurrence_case(kind, (*heads, 4), [(0, 70), (0, 1)], dtype)
        yield from (partial(linear_recurrence_triton, step_of(case, [0, 0], [count, 1])) for count in (1, 70))
    for width, group, first in ((4096, 128, False), (4096, 512, True), (8192, 8192, True)):
        x, weight = torch.empty(2, width, dtype=BF16), torch.empty(width if first else group, dtype=BF16)
        yield partial(gated_rms_norm_triton, GatedNorm(x, x, weight, 1e-5, group, gates_first=first, by_sigmoid=False))
    for gate, group in ((x, width), (x[:, :64], width // 64)):
        yield partial(gated_rms_norm_triton, GatedNorm(x, gate, None, 1e-5, group, gates_first=False, by_sigmoid=True))


def adapters(num_rows: int, rank: int, dtype: torch.dtype) -> None:
    """Of queries, keys and values in one projection, and of a projection with more inputs."""
    for width, starts in ((4096, (0, 4096, 5120, 6144)), (14_336, (0, 4096))):
        x, y = torch.empty(num_rows, width, dtype=dtype), torch.empty(num_rows, starts[-1], dtype=dtype)
        weights = lora_weights(width, starts, rank, dtype, slots=1)
        add_lora_triton_(y, x, torch.zeros(num_rows, dtype=torch.int32), weights)


def hyper_connections(x: torch.Tensor) -> None:
    tokens, size, width = x.shape
    all_parts, parts = ([torch.empty(tokens, n), torch.empty(n), torch.empty(n)] for n in (size * (size + 2), size))
    hc_norm_triton(x, 1e-6)
    hc_pre_triton(x, *all_parts, rounds=20, eps=1e-6)
    hc_head_triton(x, *parts, eps=1e-6)
    hc_post_triton(torch.empty(tokens, width, dtype=x.dtype), x, parts[0], torch.empty(tokens, size, size))
