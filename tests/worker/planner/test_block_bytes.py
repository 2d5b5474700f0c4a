"""What a block holds, against the published sizes, and which layers share a group."""

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.execution.toy_architecture import architecture, layer
from tests.worker.planner.model_configs import CONFIGS
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, Role
from transom_core.model_config.architecture import read_architecture
from transom_core.model_config.layer_attention import Compression, LayerAttention
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.layer_groups import check_runs, make_groups

BF16, FP8 = "bfloat16", "fp8"


def groups_of(name: str, dtype: str = BF16, ranks: int = 1, **changes: Any) -> dict[str, GroupLayout]:
    architecture = read_architecture(CONFIGS[name] | changes)
    groups = cache_groups(architecture, block_size=16, dtype=BF16, kv_cache_dtype=dtype, tensor_parallel_size=ranks)
    return {group.spec.name: group for group in groups}


def test_lfm2_keeps_two_rows_of_4096_bytes_in_a_convolution() -> None:
    """The published sizes: 8,192 bytes of state in each convolution, and 12,288 of keys and values for each token."""
    groups = groups_of("lfm2-1.2b")
    assert list(groups) == ["full", "convolution_3"]
    assert groups["full"].bytes_per_token == 12_288
    rows = groups["convolution_3"]
    assert [end - begin for begin, end in rows.spec.live(1000)] == [2]
    assert 2 * rows.bytes_per_token == 10 * 8192


@pytest.mark.parametrize(
    ("name", "full", "layers", "layer_bytes", "token_bytes"),
    [
        ("qwen3-next-80b", 12, 36, 2_146_304, 24_576),
        ("qwen3.5-35b-a3b", 10, 30, 2_146_304, 20_480),
        ("granite-4.0-h-small", 4, 36, 4 * 128 * 64 * 128 + 2 * 3 * 8448, 16_384),
        ("nemotron-3-nano-30b-a3b", 6, 23, 2_134_016, 6_144),
        ("jamba-1.5-mini", 4, 28, 4 * 8192 * 16 + 2 * 3 * 8192, 16_384),
        ("falcon-h1-0.5b", 36, 36, 4 * 24 * 64 * 128 + 2 * 3 * 1792, 18_432),
    ],
)
def test_a_snapshot_has_the_states_in_float32_and_three_rows(
    name: str, full: int, layers: int, layer_bytes: int, token_bytes: int
) -> None:
    """The published sizes, which do not depend on the block size; on several ranks the key heads are divided."""
    groups = groups_of(name)
    assert {kind: len(group.spec.layers) for kind, group in groups.items()} == {"full": full, "state": layers}
    assert groups["full"].bytes_per_token == token_bytes
    assert groups["state"].block_bytes == layers * layer_bytes
    ranks, share = (3, 6 / 16) if name.startswith("qwen") else (1, 1)
    assert groups_of(name, "int8", ranks=ranks)["state"].block_bytes == layers * layer_bytes * share


def test_head_sizes_may_differ_by_group() -> None:
    groups = groups_of("gemma-4-31b-like")
    assert groups["window_1024"].block_bytes == 5 * 2_621_440  # 50 layers; of ten layers that many
    assert groups["full"].block_bytes == 1_310_720


@pytest.mark.parametrize("dtype", [BF16, FP8, "float32", "int8", "int4"])
def test_every_byte_of_a_block_has_one_owner(dtype: str) -> None:
    for name in CONFIGS:
        if dtype in ("int8", "int4") and any(one.latent for one in read_architecture(CONFIGS[name]).layers):
            continue
        for group in groups_of(name, dtype).values():
            end = 0
            for offset, size, alignment in parts_of(group):
                assert end <= offset < end + alignment
                assert offset % alignment == 0
                end = offset + size
            assert end == group.block_bytes <= group.stride_bytes < end + 256


def parts_of(group: GroupLayout) -> list[tuple[int, int, int]]:
    """Offset, bytes and alignment of each tensor of a block, in order."""
    found = []
    for part in group.layers:
        rows = group.rows_per_block * part.num_kv_heads
        alignment = 1 if part.k_scale_offset is None else 16
        found.append((part.k_offset, rows * part.k_size * DTYPE_BYTES[part.dtype], alignment))
        if part.v_offset != part.k_offset:
            found.append((part.v_offset, rows * part.v_size * DTYPE_BYTES[part.dtype], alignment))
        found += [(offset, rows * 4, 16) for offset in (part.k_scale_offset, part.v_scale_offset) if offset is not None]
    return found


@pytest.mark.parametrize(
    ("dtype", "per_token"), [(BF16, 768), ("float32", 1536), (FP8, 408), ("int8", 408), ("int4", 216)]
)
def test_bytes_per_token_of_smollm2(dtype: str, per_token: int) -> None:
    """3 KV heads of 64 elements: K and V, and a float32 scale for each head of both."""
    changes = {"num_hidden_layers": 1, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    group = groups_of("llama-3-8b", dtype, **changes)["full"]
    assert (group.bytes_per_token, group.format) == (per_token, dtype)


def test_small_blocks_of_odd_heads_are_padded_to_16_bytes() -> None:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 3, "num_attention_heads": 3, "head_dim": 6}
    architecture = read_architecture(CONFIGS["llama-3-8b"] | changes)
    (group,) = cache_groups(architecture, block_size=3, dtype=BF16, kv_cache_dtype="int8")
    first, second = group.layers
    # K and V: 3 tokens of 3 heads of 6 bytes; a scale for each of the 9 rows of K and of V
    offsets = (first.k_offset, first.v_offset, first.k_scale_offset, first.v_scale_offset, second.k_offset)
    assert offsets == (0, 64, 128, 176, 224)
    assert group.block_bytes == 224 + 176 + 36


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
    assert [part.role for part in groups["compressor_state_4"].layers[:2]] == [Role.STATE, Role.INDEXER_STATE]
    exact = groups_of("deepseek-v4-flash")
    assert exact["window_128"].block_bytes == 43 * 16 * 512 * 2
    assert exact["indexer_4"].block_bytes == 21 * 4 * 128 * 2


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v2-lite", 27), ("deepseek-v3", 61), ("kimi-linear-48b", 7)])
def test_latent_rows_are_whole_on_every_rank(name: str, layers: int) -> None:
    for ranks in (1, 3, 8):
        group = groups_of(name, ranks=ranks)["latent"]
        assert group.block_bytes == layers * 16 * (512 + 64) * 2
        assert group.layers[3].v_offset == group.layers[3].k_offset
    assert name != "kimi-linear-48b" or groups_of(name)["state"].block_bytes == 20 * 2_170_880


@pytest.mark.parametrize(("name", "layers", "selecting"), [("deepseek-v3.2", 61, 61), ("glm-5.1", 78, 21)])
def test_keys_of_indexers_lie_beside_latent_rows(name: str, layers: int, selecting: int) -> None:
    """GLM-5.1 has an indexer in its first two layers and in each fourth one after them."""
    for ranks in (1, 3):
        group = groups_of(name, ranks=ranks)["latent"]
        assert group.block_bytes == 16 * (layers * (512 + 64) + selecting * 128) * 2
    first, fourth = group.layers[0], group.layers[3]
    assert (first.v_offset, first.v_size, fourth.v_offset == fourth.k_offset) == (16 * 576 * 2, 128, selecting < layers)
    assert groups_of(name, "fp8")["latent"].block_bytes == 16 * (layers * (512 + 128 + 8) + selecting * 132)
    with pytest.raises(ConfigError, match="such groups run in the model's format, bfloat16, alone"):
        check_runs([groups_of(name, "fp8")["latent"]], BF16)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (3, 3), (5, 2), (8, 1), (16, 1)])
def test_ranks_split_heads_and_the_first_has_most(ranks: int, heads: int) -> None:
    groups = groups_of("gpt-oss-20b", ranks=ranks)
    assert groups["full"].block_bytes == groups["window_128"].block_bytes == 12 * 16 * heads * 64 * 2 * 2


def test_groups_may_have_different_formats() -> None:
    plain, mixed = groups_of("gpt-oss-20b"), groups_of("gpt-oss-20b", "window=bfloat16,full=int8")
    assert {name: group.format for name, group in mixed.items()} == {"full": "int8", "window_128": BF16}
    assert mixed["window_128"] == plain["window_128"]
    assert mixed["full"].block_bytes == 12 * 16 * 8 * 2 * (64 + 4)


def test_layers_with_other_heads_share_a_quantised_group() -> None:
    """Also with values narrower than keys, as MiMo-V2-Flash has them."""
    plain = LayerAttention(num_heads=8, num_kv_heads=2, head_size=24)
    shape = architecture([plain, replace(plain, num_kv_heads=4, value_size=16)])
    (group,) = cache_groups(shape, block_size=16, dtype=BF16, kv_cache_dtype="int4")
    assert [(part.k_size, part.v_size, part.dtype) for part in group.layers] == [(12, 12, "uint8"), (12, 8, "uint8")]
    assert group.block_bytes == 16 * (2 * (24 + 8) + 4 * (20 + 8))


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("gpt-oss-20b", "int3", "'int3' is no format; give auto, bfloat16, float16, float32, fp8, int8, int4"),
        (
            "gpt-oss-20b",
            "sinks=int8",
            r"names sinks, and the KV groups of this model are full, window_128 \(kind window\)",
        ),
        ("gpt-oss-20b", "window_64=int8", "names window_64"),
        ("deepseek-v4-flash", "int8", "int8 in KV group .*latent"),
        ("deepseek-v4-flash", "compressor_state=int8", "int8 in KV group compressor_state_4, which sums up in float32"),
        ("deepseek-v4-flash", "compressed_4=int4", "int4 in KV group compressed_4"),
    ],
)
def test_formats_that_a_model_cannot_have(name: str, asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(name, asked)


def test_int4_needs_an_even_width() -> None:
    with pytest.raises(ConfigError, match=r"int4 in KV group full, which keeps two values in a byte.*65 elements"):
        groups_of("llama-3-8b", "int4", head_dim=65)


def test_layers_with_equal_retention_share_a_group() -> None:
    shape = architecture([layer(8), layer(), layer(8), layer(8, sinks=2), layer(5), layer(), layer(chunk=64)])
    assert [(group.name, group.kind, group.layers) for group in make_groups(shape, block_size=4, hybrid=True)] == [
        ("full", GroupKind.FULL, (1, 5)),
        ("window_8", GroupKind.WINDOW, (0, 2)),
        ("sinks_2_window_8", GroupKind.SINKS_WINDOW, (3,)),
        ("window_5", GroupKind.WINDOW, (4,)),
        ("chunk_64", GroupKind.CHUNK, (6,)),
    ]
    everything = GroupSpec(name="full", kind=GroupKind.FULL, layers=tuple(range(7)), block_size=4)
    assert make_groups(shape, block_size=4, hybrid=False) == (everything,)


def test_convolutions_keep_one_row_a_token_in_the_models_format_even_without_hybrid() -> None:
    shape = architecture([layer(convolution=3), layer(), layer(convolution=3)])
    for hybrid, ranks in ((True, 1), (False, 2)):
        _, rows = cache_groups(
            shape, block_size=4, dtype=BF16, kv_cache_dtype="int8", tensor_parallel_size=ranks, hybrid=hybrid
        )
        assert (rows.spec.name, rows.spec.kind, rows.spec.layers) == ("convolution_3", GroupKind.CONVOLUTION, (0, 2))
        assert (rows.format, rows.block_bytes) == (BF16, 2 * 4 * (2 // ranks) * 8 * 2)
    with pytest.raises(ConfigError, match="int8 in KV group convolution_3, which sums up in bfloat16"):
        cache_groups(shape, block_size=4, dtype=BF16, kv_cache_dtype="convolution=int8")


def test_layers_that_read_another_cache_are_in_no_group() -> None:
    shape = architecture([layer(8), layer(), layer(8, reads_cache_of=0), layer(reads_cache_of=1)])
    for hybrid in (True, False):
        groups = make_groups(shape, block_size=4, hybrid=hybrid)
        assert sorted(index for group in groups for index in group.layers) == [0, 1]


def test_compressed_layers_are_in_groups_for_window_entries_indexer_and_state() -> None:
    compressions = (None, Compression(ratio=4, overlap=1, index_size=4), Compression(ratio=128))
    shape = architecture([layer(8, latent=True, compression=one) for one in compressions])
    groups = make_groups(shape, block_size=16, hybrid=True)
    assert [(group.name, group.layers, group.block_size) for group in groups] == [
        ("compressed_4", (1,), 16),
        ("indexer_4", (1,), 16),
        ("compressed_128", (2,), 128),
        ("window_8", (0, 1, 2), 16),
        ("compressor_state_4", (1,), 16),
        ("compressor_state_128", (2,), 16),
    ]
    assert (groups[4].ratio, groups[4].overlap, groups[5].overlap) == (4, 1, 0)
    full = make_groups(shape, block_size=16, hybrid=False)
    assert [group.name for group in full] == ["latent", "compressed_4", "indexer_4", "compressed_128"]


def test_block_sizes_that_do_not_suit_the_compression_are_refused() -> None:
    shape = architecture([layer(8, latent=True, compression=Compression(ratio=128))])
    with pytest.raises(ConfigError, match="--block-size is 48, and layers compress 128 tokens"):
        make_groups(shape, block_size=48, hybrid=True)
    assert make_groups(shape, block_size=256, hybrid=True)[0].block_size == 256
