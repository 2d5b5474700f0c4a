"""Every kernel in every configuration that is launched, as `ahead_of_time.py` compiles it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transom_kernels.block_copy.gpu import WORDS, copy_words
from transom_kernels.gated_mlp.gpu import activate
from transom_kernels.hyper_connections.gpu import normalise_streams, post_and_mix, pre_and_mix, row_block, stream_blocks
from transom_kernels.kv_write.gpu import head_blocks
from transom_kernels.kv_write.kernel import prepare_and_write
from transom_kernels.latent_attention.kernel import attend_rows, pool, score_entries
from transom_kernels.latent_attention.tuning import POOL_CHANNELS, POOL_ROWS, attend_config, score_config
from transom_kernels.launch import next_power_of_two, split_width, warps_for
from transom_kernels.moe.gpu import Tile, choose_tile
from transom_kernels.moe.kernel import into_experts, out_of_experts, sum_experts
from transom_kernels.moe.row_blocks import sort_blocks, sort_pairs
from transom_kernels.paged_attention.triton.attend import attend
from transom_kernels.paged_attention.triton.combine import combine
from transom_kernels.paged_attention.triton.tuning import COMBINED_AT_ONCE, kernel_config, stages_on
from transom_kernels.policy_attention.triton import kernel as policy
from transom_kernels.policy_attention.triton.tuning import TileConfig, tile_config
from transom_kernels.rms_norm.gpu import norm_heads, norm_rows
from transom_kernels.rotary.gpu import rotate
from transom_kernels.route import gpu as routes
from transom_kernels.route.gpu import choose_experts, score_experts
from transom_kernels.sample.gpu import (
    CHANGES,
    COMPARED_IDS,
    LISTED_IDS,
    PROGRAM_BLOCKS,
    READ_BLOCKS,
    READ_CHUNKS,
    ROUND_BLOCKS,
    ROW_WARPS,
    apply_logit_changes,
    block_maxima,
)
from transom_kernels.sample.sample_rows import sample_rows

FP8 = "fp8e4nv"  # from sm_89 on
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, FP8: 1, "i8": 1, "u8": 1}
INT4 = "u8"
QUANTISED = {FP8: 448.0, "i8": 127.0, INT4: 7.0}  # the types of quantised caches, and the largest numbers


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A kernel, its arguments' types (`i32` where not given) and constants, and how it is launched."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    hopper_stages: int = 0  # on sm_90, where they differ
    unaligned: tuple[str, ...] = field(default=())  # integers that are no multiples of 16

    def stages_on(self, arch: int) -> int:
        return self.hopper_stages if self.hopper_stages and arch // 10 == 9 else self.num_stages

    @property
    def needs_fp8(self) -> bool:
        return any(FP8 in kind for kind in self.types.values())


def attention(
    rows: int, width: int, value_width: int, *, dtype: str = "bf16", cache: str = "", **flags: Any
) -> Compilation:
    config = kernel_config(
        rows=rows,
        key_size=width,
        value_size=value_width,
        element_bytes=ELEMENT_BYTES[dtype],
        cache_bytes=ELEMENT_BYTES[cache or dtype],
    )
    (d1, d2), (e1, e2) = split_width(width), split_width(value_width)
    constants = {
        **{"BLOCK_SIZE": 16, "GROUP": 8, "D": width, "D1": d1, "D2": d2, "E": value_width, "E1": e1, "E2": e2},
        **{"WINDOW": 0, "SINKS": 0, "CHUNK": 0, "UPCAST": False},
        **{"HAS_SOFT_CAP": False, "HAS_SINK_LOGITS": False},
        "HAS_SCALES": cache in QUANTISED,
        "PACKED": cache == INT4,
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, **flags},
    }
    kept = cache or dtype
    floats = ("partial_out", "partial_stats", "sink_logits", "k_scale", "v_scale")
    integers = ("items", "block_table", "first_block", "attend_from")
    types = {
        **{"q": f"*{dtype}", "out": f"*{dtype}", "k_cache": f"*{kept}", "v_cache": f"*{kept}"},
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(integers, "*i32"),
        **{"scale": "fp32", "soft_cap": "fp32", "k_stride_b": "i64", "v_stride_b": "i64"},
        **{"ks_stride_b": "i64", "vs_stride_b": "i64"},
    }
    said = "".join(f" {name.lower()}" for name, on in flags.items() if on)
    return Compilation(
        name=f"attend {dtype} {kept} rows {rows} widths {width}/{value_width}{said}",
        kernel=attend, types=types, constants=constants, num_warps=config.num_warps, num_stages=config.num_stages,
        hopper_stages=stages_on(config, (9, 0)),
        unaligned=("num_kv_heads", "num_sink_blocks", "table_stride"),
    )  # fmt: skip


def attention_cases() -> Iterator[Compilation]:
    for rows in (8, 32, 64, 128):  # one token, four tokens of 8 and of 16 query heads a KV head, a prompt
        for widths in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
            if rows < 128 or widths[0] < 256:  # tiles of prompts have 64 rows there
                yield attention(rows, *widths)
    yield from (attention(rows, 512, 512) for rows in (8, 32))
    for widths in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)):
        yield from (attention(rows, *widths, dtype="fp32") for rows in (8, 32))
    everything: dict[str, Any] = {
        "WINDOW": 128,
        "SINKS": 4,
        "CHUNK": 8192,
        "HAS_SINK_LOGITS": True,
        "HAS_SOFT_CAP": True,
    }
    for rows in (8, 128):
        yield attention(rows, 128, 128, **everything)
        yield attention(rows, 64, 64, dtype="fp16", WINDOW=128, HAS_SINK_LOGITS=True)
    for cache in QUANTISED:
        for rows in (8, 32, 64):
            yield attention(rows, 128, 128, cache=cache)
        for widths in ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256)):
            yield attention(8, *widths, cache=cache)
            yield attention(64 if widths[0] < 256 else 32, *widths, cache=cache)
    for width in (64, 80, 128, 256, 512):
        yield Compilation(
            name=f"combine width {width}", kernel=combine,
            types={"partial_out": "*fp32", "partial_stats": "*fp32", "out": "*bf16", "combine_items": "*i32",
                   "sink_logits": "*fp32"},
            constants={"GROUP": 8, "E": width, "HAS_SINK_LOGITS": True, "BLOCK_M": 16,
                       "BLOCK_E": next_power_of_two(width), "BLOCK_S": COMBINED_AT_ONCE},
            unaligned=("num_kv_heads",),
        )  # fmt: skip


def policy_cases() -> Iterator[Compilation]:
    for dtype, width in (("bf16", 64), ("bf16", 80), ("bf16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 128)):
        for flag in (True, False):
            yield policy_attention(width, dtype=dtype, decodes=True, flag=flag)
            yield policy_mass(width, dtype=dtype, flag=flag)
        yield policy_attention(width, dtype=dtype, decodes=False, flag=True)
    for cache in QUANTISED:
        for width in (64, 80, 128, 256):
            yield policy_attention(width, cache=cache, decodes=True, flag=True)
            yield policy_attention(width, cache=cache, decodes=False, flag=True)
            yield policy_mass(width, cache=cache, flag=True)


def policy_attention(width: int, *, dtype: str = "bf16", cache: str = "", decodes: bool, flag: bool) -> Compilation:
    """`flag` says whether all that a layer may add is there."""
    config = policy_tile(width, dtype, cache, decodes=decodes)
    return Compilation(
        name=f"policy attend {dtype} {cache or dtype} {width} decodes {decodes} flags {flag}", kernel=policy.attend_rows,
        types=policy_types(dtype, cache),
        constants={**policy_constants(width, config, cache, flag=flag), "E": width, "HAS_SINK_LOGITS": flag,
                   "WRITES_STATISTICS": flag, "BLOCK_N": config.block_n, "BLOCK_E": next_power_of_two(width)},
        num_warps=config.num_warps, num_stages=config.num_stages, unaligned=("num_kv_heads", "table_stride"),
    )  # fmt: skip


def policy_mass(width: int, *, dtype: str = "bf16", cache: str = "", flag: bool) -> Compilation:
    config = policy_tile(width, dtype, cache, decodes=True)
    return Compilation(
        name=f"policy mass {dtype} {cache or dtype} {width} flags {flag}", kernel=policy.add_mass,
        types={name: kind for name, kind in policy_types(dtype, cache).items() if name in policy.add_mass.arg_names},
        constants={**policy_constants(width, config, cache, flag=flag), "BLOCK_N": 16},
        num_warps=config.num_warps, num_stages=1, unaligned=("num_kv_heads", "table_stride"),
    )  # fmt: skip


def policy_tile(width: int, dtype: str, cache: str, *, decodes: bool) -> TileConfig:
    return tile_config(
        group=8,
        widest=width,
        element_bytes=ELEMENT_BYTES[dtype],
        cache_bytes=ELEMENT_BYTES[cache or dtype],
        decodes=decodes,
    )


def policy_types(dtype: str, cache: str) -> dict[str, str]:
    integers = ("block_table", "key_blocks", "num_columns", "window", "sinks", "start", "query_offset", "tiles")
    return {
        **dict.fromkeys(("q", "sink_q", "out"), f"*{dtype}"),
        **dict.fromkeys(("k_cache", "v_cache"), f"*{cache or dtype}"),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("statistics", "sink_logits", "mass", "k_scale", "v_scale"), "*fp32"),
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("k_stride_b", "v_stride_b", "ks_stride_b", "vs_stride_b"), "i64"),
    }


def policy_constants(width: int, config: TileConfig, cache: str, *, flag: bool) -> dict[str, Any]:
    return {
        **{"BLOCK_SIZE": 16, "GROUP": 8, "D": width, "HAS_SOFT_CAP": flag, "HAS_SINK_QUERY": flag, "UPCAST": False},
        **{"HAS_SCALES": cache in QUANTISED, "PACKED": cache == INT4},
        **{"BLOCK_M": config.block_m, "BLOCK_D": next_power_of_two(width)},
    }


def small_cases() -> Iterator[Compilation]:
    for width in (576, 2880, 4096, 8192):
        yield norm_of(width)
    yield norm_of(4096, " alone", HAS_RESIDUAL=False)
    for width in (1152, 5376):
        yield norm_of(width, " between norms", weights="fp32", HAS_INNER=True)
    yield norm_of(5120, " behind a norm", weights="fp32", HAS_INNER=True, HAS_WEIGHT=False)
    yield Compilation(
        name="norm_heads", kernel=norm_heads, types={"x": "*bf16", "weight": "*bf16", "eps": "fp32"},
        constants={"H": 40, "D": 128, "HAS_WEIGHT": True, "BLOCK_H": 16, "BLOCK_D": 128},
    )  # fmt: skip
    for interleaved in (False, True):
        yield Compilation(
            name=f"rotate{' interleaved' if interleaved else ''}", kernel=rotate,
            types=dict.fromkeys(("x", "cos", "signed_sin"), "*bf16"),
            constants={"H": 40, "R": 128, "INTERLEAVED": interleaved, "BLOCK_H": 16, "BLOCK_R": 128},
        )  # fmt: skip
    for name, gelu, has_limit in (("", False, False), (" gelu", True, False), (" clamped", False, True)):
        yield Compilation(
            name=f"activate{name}", kernel=activate, types={"gate_up": "*bf16", "out": "*bf16", "limit": "fp32"},
            constants={"GELU": gelu, "HAS_LIMIT": has_limit, "BLOCK_N": 2048},
        )  # fmt: skip
    yield Compilation(
        name="copy_words", kernel=copy_words,
        types={"source": "*i32", "target": "*i32", "source_ids": "*i64", "target_ids": "*i64", "source_stride": "i64",
               "target_stride": "i64"},
        constants={"BLOCK_W": WORDS}, num_warps=8,
    )  # fmt: skip
    yield from prepare_cases()


def norm_of(width: int, what: str = "", *, weights: str = "bf16", **flags: bool) -> Compilation:
    block = next_power_of_two(width)
    return Compilation(
        name=f"norm_rows {width}{what}", kernel=norm_rows,
        types={"eps": "fp32", "factor": "fp32", **dict.fromkeys(("x", "residual", "out", "sums"), "*bf16"),
               **dict.fromkeys(("inner", "weight"), f"*{weights}")},
        constants={"N": width, **({"HAS_INNER": False, "HAS_RESIDUAL": True, "HAS_WEIGHT": True} | flags), "BLOCK_N": block},
        num_warps=warps_for(block),
    )  # fmt: skip


def prepare_cases() -> Iterator[Compilation]:
    normed: dict[str, Any] = {"NORM": True, "HAS_Q_WEIGHT": True, "HAS_K_WEIGHT": True}
    for cache in ("bf16", *QUANTISED):
        yield prepare(f"{cache} with norms", (32, 8, 128), cache=cache, **normed)
    for width in (64, 80, 128, 256):
        yield prepare(
            f"of {width} by the Hadamard matrix",
            (32, 8, width),
            cache=INT4,
            LOG_HADAMARD=(width & -width).bit_length() - 1,
        )
    yield prepare("of 64 without norms", (64, 8, 64))
    yield prepare("of 256 with wide norms of values too", (8, 4, 256), norms="fp32", VALUE_NORM=True, **normed)
    yield prepare("of 512 with wide norms of values too", (32, 4, 512), norms="fp32", VALUE_NORM=True, **normed)
    yield prepare("normed after rotation", (40, 8, 128), NORM_AFTER=True)
    yield prepare("scaled without rotation", (40, 8, 128), R=0, HAS_QUERY_SCALE=True)
    latent: dict[str, Any] = {"NORM": True, "HAS_K_WEIGHT": True, "R": 64, "INTERLEAVED": True}
    yield prepare("of latent rows", (64, 1, 512), **latent, BEGIN=448)
    for width in (128, 512):  # entries of compressors
        yield prepare(
            f"of entries {width} wide",
            (0, 1, width),
            dtype="fp32",
            norms="fp32",
            tables="bf16",
            **latent,
            BEGIN=width - 64,
        )
    for width in (128, 512, 1024):  # a compressor's state
        yield prepare(f"of state {width} wide", (0, 1, width), dtype="fp32", cache="fp32", R=0)


def prepare(
    what: str,
    sizes: tuple[int, int, int],
    *,
    dtype: str = "bf16",
    cache: str = "bf16",
    norms: str = "bf16",
    tables: str = "",
    **flags: Any,
) -> Compilation:
    heads, kv_heads, width = sizes
    block_d, block_h = head_blocks(max(heads, kv_heads), width)
    off = dict.fromkeys(("INTERLEAVED", "NORM", "HAS_Q_WEIGHT", "HAS_K_WEIGHT", "NORM_AFTER", "VALUE_NORM"), False)
    return Compilation(
        name=f"prepare_and_write {what}", kernel=prepare_and_write,
        types={
            **dict.fromkeys(("q", "k", "v", "q_out", "query_scale"), f"*{dtype}"),
            **dict.fromkeys(("cos", "signed_sin"), f"*{tables or dtype}"),
            **dict.fromkeys(("q_weight", "k_weight"), f"*{norms}"),
            "k_cache": f"*{cache}", "v_cache": f"*{cache}", "slots": "*i64", "k_scale": "*fp32", "v_scale": "*fp32",
            "value_factor": "fp32", "eps": "fp32", "k_stride_b": "i64", "v_stride_b": "i64",
            "ks_stride_b": "i64", "vs_stride_b": "i64",
        },
        constants={
            "BLOCK_SIZE": 16, "H": heads, "KVH": kv_heads, "D": width, "E": width, "R": width, "BEGIN": 0, **off,
            "HAS_QUERY_SCALE": False, "LOG_HADAMARD": 0, "TO_INTEGER": cache in ("i8", INT4),
            "LARGEST": QUANTISED.get(cache, 0.0), "PACKED": cache == INT4, "BLOCK_H": block_h, "BLOCK_D": block_d,
            "BLOCK_E": block_d, **flags,
        },
    )  # fmt: skip


def expert_cases() -> Iterator[Compilation]:
    for is_mx, dtype in ((False, "bf16"), (True, "bf16"), (False, "fp32"), (True, "fp32")):
        for rows in (1, 64, 256):
            tile = choose_tile(rows, 1, is_mx=is_mx, element_bytes=ELEMENT_BYTES[dtype])
            yield from expert_products(tile, is_mx, dtype)
    for experts in (8, 32, 256):
        block_e, block_c = sort_blocks(experts)
        yield Compilation(
            name=f"sort_pairs {experts} experts", kernel=sort_pairs,
            types={"experts": "*i64", "pairs": "*i32", "block_expert": "*i32"},
            constants={"NUM_EXPERTS": experts, "BLOCK_M": 16, "BLOCK_E": block_e, "BLOCK_C": block_c},
            num_warps=8, unaligned=("num_pairs", "num_blocks"),
        )  # fmt: skip
    yield Compilation(
        name="sum_experts",
        kernel=sum_experts,
        types={"results": "*fp32", "out": "*bf16"},
        constants={"NUM_CHOSEN": 8, "BLOCK_N": 1024},
    )


def expert_products(tile: Tile, is_mx: bool, dtype: str) -> Iterator[Compilation]:
    sizes = {"UPCAST": False, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_J": tile.block_j}
    weight = "*u8" if is_mx else f"*{dtype}"
    common = {"scales": "*u8", "bias": f"*{dtype}", "weights": "*fp32", "pairs": "*i32", "block_expert": "*i32"}
    launch: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "unaligned": ("num_pairs",)}
    kind = f"{dtype} by {'mxfp4' if is_mx else dtype} rows {tile.block_m}"
    yield Compilation(
        name=f"into_experts {kind}", kernel=into_experts,
        types={"x": f"*{dtype}", "gate_up": weight, "out": f"*{dtype}", **common, "limit": "fp32", "gain": "fp32",
               "up_offset": "fp32"},
        constants={"NUM_CHOSEN": 4, "INTERLEAVED": is_mx, "IS_MX": is_mx, "HAS_BIAS": True, "SCALES_INPUT": False,
                   "HAS_LIMIT": True, "GELU": False, **sizes}, **launch,
    )  # fmt: skip
    yield Compilation(
        name=f"out_of_experts {kind}", kernel=out_of_experts,
        types={"x": f"*{dtype}", "down": weight, "out": "*fp32", **common},
        constants={"IS_MX": is_mx, "HAS_BIAS": True, "SCALES_OUTPUT": True, **sizes}, **launch,
    )  # fmt: skip


def latent_cases() -> Iterator[Compilation]:
    for heads, width, dtype in ((16, 512, "bf16"), (64, 512, "bf16"), (64, 512, "fp32"), (16, 128, "fp32")):
        config = attend_config(heads, width, ELEMENT_BYTES[dtype])
        yield Compilation(
            name=f"attend_rows {dtype} {heads} heads of {width}", kernel=attend_rows,
            types={**dict.fromkeys(("q", "window_cache", "entry_cache", "out"), f"*{dtype}"), "window_slots": "*i64",
                   "entry_slots": "*i64", "sink_logits": "*fp32", "scale": "fp32", "window_stride_b": "i64",
                   "entry_stride_b": "i64"},
            constants={"D": width, "WINDOW_P": 16, "ENTRY_P": 4, "UPCAST": False, "BLOCK_H": config.block_h,
                       "BLOCK_D": next_power_of_two(width), "BLOCK_N": config.block_n},
            num_warps=config.num_warps, num_stages=config.num_stages, unaligned=("num_heads", "num_window", "num_entries"),
        )  # fmt: skip
    for dtype in ("bf16", "fp32"):
        config = score_config(64, 128, ELEMENT_BYTES[dtype])
        yield Compilation(
            name=f"score_entries {dtype}", kernel=score_entries,
            types={"q": f"*{dtype}", "key_cache": f"*{dtype}", "head_weights": "*fp32", "slots": "*i64", "sequence": "*i64",
                   "num_visible": "*i64", "scores": "*fp32", "scale": "fp32", "key_stride_b": "i64"},
            constants={"D": 128, "P": 4, "UPCAST": False, "BLOCK_H": config.block_h, "BLOCK_D": 128, "BLOCK_N": config.block_n},
            num_warps=config.num_warps, num_stages=config.num_stages, unaligned=("num_heads", "num_entries", "num_rounds"),
        )  # fmt: skip
    for groups, ratio in ((1, 128), (2, 4)):
        yield Compilation(
            name=f"pool {groups} x {ratio}", kernel=pool,
            types={**dict.fromkeys(("kv_cache", "gate_cache", "position_bias", "out"), "*fp32"), "slots": "*i64",
                   "kv_stride_b": "i64", "gate_stride_b": "i64"},
            constants={"D": 512, "R": ratio, "G": groups, "P": 4, "BLOCK_R": min(POOL_ROWS, groups * ratio),
                       "BLOCK_D": POOL_CHANNELS},
        )  # fmt: skip


def route_cases() -> Iterator[Compilation]:
    for experts, chosen, width in ((8, 2, 4096), (32, 4, 2880), (128, 8, 4096), (256, 6, 4096), (512, 10, 7168)):
        kind = f"{chosen} of {experts} by {width}"
        split = routes.split_of(width, experts)
        for dtype, tokens in (("bf16", 1), ("bf16", 8192), ("fp32", 1), ("fp32", 8192)):
            tile = routes.choose_tile(tokens, experts)
            yield Compilation(
                name=f"router's scores {dtype} {kind} {'few' if tokens == 1 else 'many'} tokens", kernel=score_experts,
                types={"x": f"*{dtype}", "weight": "*fp32", "partials": "*fp32"},
                constants={"E": experts, "N": width, "SPLIT": split, "BLOCK_T": tile.block_t, "BLOCK_E": tile.block_e,
                           "BLOCK_N": tile.block_n, "weight_stride_e": 1},
                num_warps=tile.num_warps, num_stages=tile.num_stages, unaligned=("num_tokens",),
            )  # fmt: skip
        splits = -(-width // split)
        block_s, block_e, num_warps = routes.read_blocks(splits, experts)
        for what, score, flags in (
            ("plain", 0, ()),
            ("corrected", 2, ("HAS_CORRECTION",)),
            ("fixed", 2, ("IS_FIXED",)),
        ):
            yield Compilation(
                name=f"router's choice {what} {kind}", kernel=choose_experts,
                types={**dict.fromkeys(("partials", "bias", "correction", "expert_scale", "weights"), "*fp32"), "chosen": "*i64",
                       "experts": "*i64", "scale": "fp32", "tiny": "fp32"},
                constants={"E": experts, "K": chosen, "SPLITS": splits, "SCORE": score, "NORMALISE": True, "HAS_BIAS": True,
                           "HAS_SCALE": True, **{flag: flag in flags for flag in ("HAS_CORRECTION", "IS_FIXED")},
                           "BLOCK_E": block_e, "BLOCK_K": next_power_of_two(chosen), "BLOCK_S": block_s},
                num_warps=num_warps,
            )  # fmt: skip


def sample_cases() -> Iterator[Compilation]:
    floats = ("logits", "temperatures", "top_ps", "min_ps", "maxima", "noisiest", "max_noise", "chunk_sums")
    types = {**dict.fromkeys(floats, "*fp32"), "top_ks": "*i32", "lists": "*i32", "keys": "*i64", "out": "*i64"}
    yield Compilation(
        name="block_maxima", kernel=block_maxima, types=types, constants={"BLOCKS": PROGRAM_BLOCKS}, num_warps=1,
        unaligned=("num_blocks",)
    )  # fmt: skip
    yield Compilation(
        name="sample_rows", kernel=sample_rows, types=types,
        constants={"BLOCK_B": READ_BLOCKS, "BLOCK_C": READ_CHUNKS, "BLOCK_L": LISTED_IDS, "ROUND": ROUND_BLOCKS,
                   "KEPT": COMPARED_IDS},
        num_warps=ROW_WARPS, unaligned=("num_blocks", "num_chunks"),
    )  # fmt: skip
    yield Compilation(
        name="apply_logit_changes", kernel=apply_logit_changes,
        types={**dict.fromkeys(("logits", "factors", "subtrahends"), "*fp32"), "rows": "*i64", "ids": "*i64"},
        constants={"BLOCK_C": CHANGES}, unaligned=("num_changes",),
    )  # fmt: skip


def hyper_connection_cases() -> Iterator[Compilation]:
    for dtype, size, width in (("bf16", 4, 4096), ("bf16", 4, 7168), ("fp32", 4, 7168), ("bf16", 3, 2880)):
        block_s, block_n = stream_blocks(size, width)
        block_w, num_warps = row_block(size * width)
        what, sizes = f"{dtype} {size} x {width}", {"S": size, "N": width, "BLOCK_S": block_s, "BLOCK_N": block_n}
        types = {
            **dict.fromkeys(("x", "y", "out"), f"*{dtype}"),
            **dict.fromkeys(("projected", "scale", "base", "post", "mix"), "*fp32"),
        }
        yield Compilation(
            name=f"hc norm {what}", kernel=normalise_streams, types={"x": f"*{dtype}", "out": "*fp32", "eps": "fp32"},
            constants={"WIDTH": size * width, "BLOCK_W": block_w}, num_warps=num_warps,
        )  # fmt: skip
        for name, coefficients in (("pre", size * (size + 2)), ("head", size)):
            yield Compilation(
                name=f"hc {name} {what}", kernel=pre_and_mix, types={**types, "eps": "fp32"},
                constants={**sizes, "M": coefficients}, unaligned=("rounds",),
            )  # fmt: skip
        yield Compilation(name=f"hc post {what}", kernel=post_and_mix, types=types, constants=sizes)


def all_cases() -> list[Compilation]:
    cases = (
        *attention_cases(), *small_cases(), *expert_cases(), *route_cases(), *latent_cases(), *sample_cases(),
        *policy_cases(),
        *hyper_connection_cases(),
    )  # fmt: skip
    return list({case.name: case for case in cases}.values())  # some sizes get the same tile
