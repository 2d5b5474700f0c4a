"""Views of the slab: every byte of a block belongs to one tensor of one layer. A host tier that does not fit is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.worker.execution.hand_scheduler import engine_config, make_runner
from tests.worker.execution.toy_architecture import architecture, layer
from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.model_config.layer_attention import Compression, LayerAttention
from transom_worker.execution.tiers.slabs import (
    allocate_host_slab,
    allocate_slab,
    block_rows,
    compressed_caches,
    group_of_layer,
    layer_caches,
    pinned_bytes,
)
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.pages import make_layout

CPU = torch.device("cpu")
EMPTY = ArenaLayout(page_bytes=1 << 20, num_pages=64, groups=())
SHAPE = architecture([layer(8), layer(), layer(8), layer(8, sinks=2)])


@pytest.mark.parametrize("asked", ["auto", "int8", "fp8", "int4", "window_8=int4,full=int8", "sinks_window=fp8"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_tensors_and_scales_do_not_overlap(asked: str, block_size: int) -> None:
    groups = cache_groups(SHAPE, block_size=block_size, dtype="float32", kv_cache_dtype=asked)
    layout = make_layout(groups, pool_bytes=100_000)
    slab = allocate_slab(layout, CPU)
    caches = layer_caches(layout, slab)
    for index, group in enumerate(layout.groups):
        slab.zero_()
        num_bytes = 0
        for tensors in group.layers:
            cache = caches[tensors.layer]
            assert cache.hadamard == (group.format == "int4")
            assert (cache.k_scale is None) == (cache.v_scale is None) == (group.format == "float32")
            for view in (cache.k, cache.v, cache.k_scale, cache.v_scale):
                if view is None:
                    continue
                raw = bytes_of(view if view.dim() == 4 else view[..., None])
                assert raw.shape[:3] == (layout.num_block_ids(index), block_size, 2)
                assert tensors.k_scale_offset is None or raw.storage_offset() % 16 == 0
                raw.add_(1)
                num_bytes += raw[0].numel()
        rows = block_rows(layout, slab, index)
        content = rows[:, : group.block_bytes]
        assert content.max() == 1
        assert (content.sum(dim=1, dtype=torch.int64) == num_bytes).all()  # padding is left
        assert (rows[:, group.block_bytes :] == 0).all()


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 4), ("bfloat16", 32), ("bfloat16", 8)])
def test_a_layer_that_compresses_has_a_cache_for_each_role(dtype: str, block_size: int, hybrid: bool) -> None:
    latent = LayerAttention(num_heads=2, num_kv_heads=1, head_size=8, window=8, latent=True)
    sparse = replace(latent, compression=Compression(ratio=4, overlap=1, index_size=6))
    heavy = replace(latent, compression=Compression(ratio=16))
    shape = architecture([latent, sparse, heavy, sparse])
    layout = make_layout(cache_groups(shape, block_size=block_size, dtype=dtype, hybrid=hybrid), pool_bytes=400_000)
    slab = allocate_slab(layout, CPU)
    caches, compressed = layer_caches(layout, slab), compressed_caches(layout, slab)
    assert [cache is None for cache in compressed] == [True, False, False, False]
    assert [cache.index is None for cache in compressed[1:]] == [False, True, False]  # type: ignore[union-attr]
    views = [(cache.k, group) for cache, group in zip(caches, group_of_layer(layout), strict=True)]
    for cache in compressed[1:]:
        assert cache is not None
        for part in (cache, cache.index):
            views += [(part.entries.cache.k, part.entries.group)] if part else []
            views += [(view, part.state.group) for view in (part.state.cache.k, part.state.cache.v)] if part else []
    for index, group in enumerate(layout.groups):
        slab.zero_()
        for view, view_group in views:
            if view_group == index:
                assert view.shape[:3] == (layout.num_block_ids(index), group.rows_per_block, 1)
                bytes_of(view).add_(1)
        rows = block_rows(layout, slab, index)
        assert (rows[:, : group.block_bytes] == 1).all()  # every byte was reached exactly once
        assert (rows[:, group.block_bytes :] == 0).all()


def bytes_of(view: torch.Tensor) -> torch.Tensor:
    """A view [N, P, 1, D] as bytes of the same memory."""
    size = view.element_size()
    strides = [stride * size for stride in view.stride()[:3]]
    raw = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    return raw.as_strided((*view.shape[:3], view.shape[3] * size), (*strides, 1), view.storage_offset() * size)


def test_memory_that_is_short_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"2 ranks .* KV pools of 1048576 bytes take 2097152 bytes, and 1000 are free"
    ):
        allocate_host_slab(EMPTY, CPU, available_bytes=1000, pool_bytes=1 << 20, ranks_on_host=2)


def test_on_gpus_exactly_the_slab_is_pinned_and_unpinned_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}), cudaHostUnregister=pinned.pop
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    slab = pinned_bytes(3 << 20)
    assert pinned == {slab.data_ptr(): 3 << 20}
    assert not slab.any()
    del slab
    assert not pinned


def test_a_host_tier_larger_than_the_memory_ends_the_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--swap-space asks for a host tier of \d+ bytes; .* Give at most"):
        make_runner(engine_config(tiny_model, host_bytes=2**50))
