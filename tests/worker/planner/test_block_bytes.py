"""What a block holds, against the published sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.worker.planner.model_configs import CONFIGS
from transom_worker.errors import ConfigError
from transom_worker.kvcache.layout import GroupLayout, Role
from transom_worker.model_config.architecture import read_architecture
from transom_worker.planner.blocks import DTYPE_BYTES, KV_CACHE_DTYPES, cache_groups, kv_dtype

BF16, FP8 = "bfloat16", "float8_e4m3fn"


def groups_of(name: str, dtype: str = BF16, ranks: int = 1, **changes: Any) -> dict[str, GroupLayout]:
    architecture = read_architecture(CONFIGS[name] | changes)
    groups = cache_groups(architecture, block_size=16, dtype=dtype, tensor_parallel_size=ranks)
    return {group.spec.name: group for group in groups}


@pytest.mark.parametrize(
    ("heads", "size", "dtype", "expected"),
    [(8, 64, BF16, 32_768), (8, 128, BF16, 65_536), (16, 128, BF16, 131_072), (8, 128, FP8, 32_768)],
)
def test_dense_bytes_of_one_layer(heads: int, size: int, dtype: str, expected: int) -> None:
    changes = {"num_hidden_layers": 1, "num_key_value_heads": heads, "head_dim": size}
    assert groups_of("llama-3-8b", dtype, **changes)["full"].block_bytes == expected


@pytest.mark.parametrize(
    ("name", "tokens", "gib"), [("llama-7b", 4096, 2.0), ("llama-3-8b", 2048, 0.25), ("llama-3-70b", 2048, 0.625)]
)
def test_well_known_sizes_of_whole_sequences(name: str, tokens: int, gib: float) -> None:
    assert groups_of(name)["full"].block_bytes * tokens // 16 == int(gib * 2**30)


def test_head_sizes_may_differ_by_group() -> None:
    groups = groups_of("gemma-4-31b-like")
    assert groups["window_1024"].block_bytes == 5 * 2_621_440  # 50 layers; of ten layers that many
    assert groups["full"].block_bytes == 1_310_720


def test_every_byte_of_a_block_has_one_owner() -> None:
    for name, dtype in itertools.product(CONFIGS, (BF16, FP8, "float32")):
        for group in groups_of(name, dtype).values():
            end = 0
            for part in group.layers:
                row_bytes = group.rows_per_block * part.num_kv_heads * DTYPE_BYTES[part.dtype]
                assert part.k_offset == end
                assert part.k_offset % DTYPE_BYTES[part.dtype] == 0
                end += row_bytes * part.k_size
                if part.v_offset != part.k_offset:
                    assert part.v_offset == end
                    end += row_bytes * part.v_size
            assert end == group.block_bytes <= group.stride_bytes < end + 256


def test_deepseek_v4_rows() -> None:
    """In FP8 as published: rows of 584 bytes, indexer keys of 132, states in float32; vLLM pads blocks to 576 besides."""
    groups = groups_of("deepseek-v4-flash", FP8)
    assert {name: (len(g.spec.layers), g.block_bytes) for name, g in groups.items()} == {
        "compressed_4": (21, 21 * 4 * 584),
        "indexer_4": (21, 21 * 4 * 132),
        "compressed_128": (20, 20 * 584),
        "window_128": (43, 43 * 16 * 584),
        "compressor_state_4": (21, 21 * 16 * 2 * 2 * (512 + 128) * 4),
        "compressor_state_128": (20, 20 * 16 * 2 * 512 * 4),
    }
    roles = [part.role for part in groups["compressor_state_4"].layers[:2]]
    assert roles == [Role.STATE, Role.INDEXER_STATE]
    exact = groups_of("deepseek-v4-flash")
    assert exact["window_128"].block_bytes == 43 * 16 * 512 * 2
    assert exact["indexer_4"].block_bytes == 21 * 4 * 128 * 2


def test_latent_attention_of_deepseek_v3() -> None:
    config: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_hidden_layers": 61,
    }
    group = groups_of("llama-3-8b", **config)["latent"]
    assert group.block_bytes == 61 * 16 * 576 * 2
    assert group.layers[3].v_offset == group.layers[3].k_offset


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (3, 3), (5, 2), (8, 1), (16, 1)])
def test_ranks_split_heads_and_the_first_has_most(ranks: int, heads: int) -> None:
    groups = groups_of("gpt-oss-20b", ranks=ranks)
    assert groups["full"].block_bytes == groups["window_128"].block_bytes == 12 * 16 * heads * 64 * 2 * 2


def test_ranks_do_not_shrink_what_is_replicated() -> None:
    one, eight = groups_of("deepseek-v4-flash"), groups_of("deepseek-v4-flash", ranks=8)
    assert one == eight


def test_number_formats_by_their_names() -> None:
    assert kv_dtype("auto", "float32") == "float32"
    assert {kv_dtype(name, BF16) for name in KV_CACHE_DTYPES} == {BF16, "float16", "float32", FP8}
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'int3'; give auto, bf16, bfloat16"):
        kv_dtype("int3", BF16)
