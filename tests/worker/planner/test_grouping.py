"""Layers that keep the same tokens share a group; a layer may be in several."""

from __future__ import annotations

import pytest

from tests.worker.execution.toy_decoder import architecture
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.model_config.layer_attention import Compression, LayerAttention
from transom_worker.planner.layer_groups import make_groups


def layer(window: int | None = None, **fields: object) -> LayerAttention:
    return LayerAttention(num_heads=2, num_kv_heads=2, head_size=8, window=window, **fields)  # type: ignore[arg-type]


def test_layers_with_equal_retention_share_a_group() -> None:
    shape = architecture([layer(8), layer(), layer(8), layer(8, sinks=2), layer(5), layer(), layer(chunk=64)])
    groups = make_groups(shape, block_size=4, hybrid=True)
    assert [(group.name, group.kind, group.layers) for group in groups] == [
        ("full", GroupKind.FULL, (1, 5)),
        ("window_8", GroupKind.WINDOW, (0, 2)),
        ("sinks_2_window_8", GroupKind.SINKS_WINDOW, (3,)),
        ("window_5", GroupKind.WINDOW, (4,)),
        ("chunk_64", GroupKind.CHUNK, (6,)),
    ]


def test_layers_that_read_another_cache_are_in_no_group() -> None:
    shape = architecture([layer(8), layer(), layer(8, reads_cache_of=0), layer(reads_cache_of=1)])
    for hybrid in (True, False):
        groups = make_groups(shape, block_size=4, hybrid=hybrid)
        assert sorted(index for group in groups for index in group.layers) == [0, 1]


def test_without_hybrid_one_full_group_holds_all_layers() -> None:
    shape = architecture([layer(8), layer(), layer(8, sinks=2), layer(chunk=64)])
    groups = make_groups(shape, block_size=4, hybrid=False)
    assert groups == (GroupSpec(name="full", kind=GroupKind.FULL, layers=(0, 1, 2, 3), block_size=4),)


def test_compressed_layers_are_in_groups_for_window_entries_indexer_and_state() -> None:
    sparse = Compression(ratio=4, overlap=1, index_size=4)
    shape = architecture(
        [
            layer(8, latent=True),
            layer(8, latent=True, compression=sparse),
            layer(8, latent=True, compression=Compression(ratio=128)),
        ]
    )
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
