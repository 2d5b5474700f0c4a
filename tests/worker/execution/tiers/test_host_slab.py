"""A host tier that does not fit is refused with the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.worker.execution.hand_scheduler import engine_config, make_runner
from tests.worker.execution.toy_decoder import layer, load_toy
from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.execution.tiers.slabs import allocate_host_slab, pinned_bytes

LAYOUT = ArenaLayout(page_bytes=1 << 20, num_pages=64, groups=())
CPU = torch.device("cpu")


def test_memory_that_is_short_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"2 ranks .* KV pools of 1048576 bytes take 2097152 bytes, and 1000 are free"
    ):
        allocate_host_slab(LAYOUT, CPU, available_bytes=1000, pool_bytes=1 << 20, ranks_on_host=2)


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


def test_a_host_tier_on_a_runner() -> None:
    runner = make_runner(engine_config(host_bytes=2**21), load_toy([layer(), layer(window=7)]))
    info = runner.info
    assert info.host_layout is not None
    assert info.host_layout.groups == info.layout.groups
    assert info.host_layout.num_pages == 2**21 // info.layout.page_bytes
    block = info.host_layout.num_block_ids(0) - 2
    data = bytes(range(256)) * (info.layout.groups[0].block_bytes // 256)
    runner.tiers.write(1, 0, [block], data)
    assert runner.tiers.read(1, 0, [block]) == data
    runner.close()
    runner.close()


def test_a_host_tier_larger_than_the_memory_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"--swap-space asks for a host tier of \d+ bytes; .* Give at most"):
        make_runner(engine_config(host_bytes=2**50), load_toy([layer()]))
