"""The size of the KV pool, from the settings and from the machine's memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.execution.hand_scheduler import engine_config, make_runner
from tests.worker.execution.toy_architecture import architecture, layer
from transom_core.config import DEFAULT_CPU_KV_SHARE, CacheConfig, SchedulerConfig
from transom_core.errors import ConfigError
from transom_worker.execution import memory
from transom_worker.planner.blocks import cache_groups

CPU = torch.device("cpu")


def never() -> None:
    raise AssertionError("nothing to profile on a CPU")


def test_cpus_give_a_share_of_what_is_free_but_no_more_than_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 8_000_000)
    cache = CacheConfig()
    room = int(8_000_000 * DEFAULT_CPU_KV_SHARE)
    assert memory.pool_bytes(cache, device=CPU, max_useful_bytes=2**40, run_worst_case=never) == room
    assert memory.pool_bytes(cache, device=CPU, max_useful_bytes=1000, run_worst_case=never) == 1000


def test_max_useful_bytes_hold_every_sequence_at_full_length() -> None:
    groups = cache_groups(architecture([layer(), layer(4)]), block_size=4, dtype="float32")
    stride = groups[0].stride_bytes
    assert stride == groups[1].stride_bytes == 512
    scheduler = SchedulerConfig(max_num_seqs=2)
    assert (
        memory.max_useful_bytes(groups, scheduler, max_model_len=9)
        == scheduler.max_num_seqs * 2 * 4 * stride + 16 * stride
    )


@pytest.mark.parametrize(
    ("pool_bytes", "message"),
    [
        (500, "cannot hold one block"),
        (1 << 50, r"KV pool of \d+ bytes cannot be allocated on cpu .* smaller --kv-cache-memory"),
    ],
)
def test_pools_that_cannot_be_are_refused(tiny_model: Path, pool_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(engine_config(tiny_model, pool_bytes=pool_bytes))


def test_a_gpu_keeps_memory_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"max_memory_allocated": 300, "memory_reserved": 350, "mem_get_info": (550, 1000)}
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, figure=figure: figure)
    cache = CacheConfig(gpu_memory_utilization=0.9)
    options = {"device": torch.device("cuda"), "max_useful_bytes": 2**40, "run_worst_case": lambda: None}
    assert memory.pool_bytes(cache, **options) == 900 - 100 - 300  # type: ignore[arg-type]
    assert memory.pool_bytes(cache, graph_bytes=200, **options) == 300  # type: ignore[arg-type]
    assert memory.pool_bytes(cache, made_bytes=50, **options) == 550  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="CUDA graphs will take 500; raise it, lower"):
        memory.pool_bytes(cache, graph_bytes=500, **options)  # type: ignore[arg-type]
    # Workers that share the GPU take a part of the 900, whether the others hold theirs already or not.
    for share, expected in ((0.9, 500), (0.5, 450 - 300)):
        assert memory.pool_bytes(replace(cache, gpu_share=share), **options) == expected  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"of which this worker has the share 0\.25, leaves nothing"):
        memory.pool_bytes(replace(cache, gpu_share=0.25), **options)  # type: ignore[arg-type]
