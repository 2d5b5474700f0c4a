"""The start-up report has the plan's integers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transom_core.config import CacheConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import GroupLayout, LayerTensors
from transom_worker.engine import startup_report
from transom_worker.execution.executor import ExecutorInfo, MemoryReport, RankInfo
from transom_worker.planner import plan_cache


def group(kind: GroupKind, **sizes: int) -> GroupLayout:
    spec = GroupSpec(name=str(kind), kind=kind, layers=(0, 1), block_size=16, **sizes)
    tensors = LayerTensors(layer=0, num_kv_heads=1, k_size=1, v_size=1, dtype="int8", k_offset=0, v_offset=0)
    return GroupLayout(spec=spec, block_bytes=1000, stride_bytes=1024, layers=(tensors,))


def test_report_says_where_memory_went_and_what_fits() -> None:
    kinds = [
        group(GroupKind.FULL),
        group(GroupKind.SINKS_WINDOW, window=32, sinks=4),
        group(GroupKind.COMPRESSED, ratio=4),
        group(GroupKind.COMPRESSOR_STATE, ratio=4, overlap=1),
    ]
    plan = plan_cache(kinds, memory_bytes=2**20, block_size=16, max_model_len=4096, max_num_batched_tokens=512)
    info = ExecutorInfo(
        plan=plan,
        max_model_len=4096,
        vocab_size=10,
        eos_token_ids=(),
        memory=MemoryReport(device="cpu", weight_bytes=2**20, activation_bytes=2**21, kv_bytes=2**20),
    )
    report = startup_report.startup_report(info, model="m", cache=CacheConfig())
    assert " tier " not in report
    assert "operators run as torch's own" in report.splitlines()
    compiled = startup_report.startup_report(
        replace(info, kernels="cpu", compile_s=9.04), model="m", cache=CacheConfig()
    )
    assert "operators run as kernels compiled for this CPU (compiling them took 9.0 s, once)" in compiled.splitlines()
    assert "weights 1 MiB, activations 2 MiB, KV pool 1 MiB (1,024 pages of 1,024 bytes, 2.3% waste)" in report
    rows = [line.split("  ") for line in report.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells == [
        [
            "group",
            "layers",
            "keep",
            "format",
            "bytes per token",
            "block",
            "bytes per block",
            "per page",
            "at most per sequence",
        ],
        ["full", "2", "all tokens", "int8", "62", "16 tokens", "1,000", "1", "256 blocks"],
        ["sinks_window", "2", "32 tokens + first 4", "int8", "62", "16 tokens", "1,000", "1", "4 blocks"],
        ["compressed", "2", "an entry per 4 tokens", "int8", "62", "16 tokens", "1,000", "1", "256 blocks"],
        ["compressor_state", "2", "up to 8 tokens", "int8", "62", "16 tokens", "1,000", "1", "2 blocks"],
    ]
    # 64 + 4 + 64 + 2 blocks of 1,024 tokens, 256 + 4 + 256 + 2 of 4,096; the state holds one at the end
    assert f"one sequence of 4,096 tokens takes {1024 * (256 + 4 + 256 + 1):,} bytes" in report
    assert "at once run 7 of 1,024, 1 of 4,096" in report
    assert f"a step of 512 tokens takes {1024 * 2 * 32:,} bytes more" in report
    assert "restored by computing 62 tokens" in report


def test_report_names_the_tiers_below_the_device() -> None:
    plan = plan_cache(
        [group(GroupKind.FULL)],
        memory_bytes=2**20,
        block_size=16,
        max_model_len=4096,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        host_bytes=3 << 20,
    )
    info = ExecutorInfo(
        plan=plan,
        max_model_len=4096,
        vocab_size=10,
        eos_token_ids=(),
        memory=MemoryReport(device="cpu", weight_bytes=0, activation_bytes=0, kv_bytes=0),
    )
    lines = startup_report.startup_report(
        info, model="m", cache=CacheConfig(disk_cache="/d", disk_space_bytes=5 << 30)
    ).splitlines()
    (host,) = [line for line in lines if line.startswith("host tier")]
    assert host.startswith("host tier 3 MiB on each rank (3,072 pages) for evicted prefixes and preempted sequences")
    assert host.endswith(": the KV of 48 of 1,024, 12 of 4,096")
    # each of the two ranks writes 64 or 256 blocks of 1,000 bytes, in 1,024
    on_disk = [(5 << 30) // (2 * num_blocks * 1024) for num_blocks in (64, 256)]
    assert (
        "disk tier in /d, up to 5,120 MiB for all processes that use it: the KV of about "
        f"{on_disk[0]:,} of 1,024, {on_disk[1]:,} of 4,096" in lines
    )
    assert plan.as_json()["host_concurrency"][1]["requests"] == 12


def test_the_report_of_ranks_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names its GPU, and the report says whether steps are replayed, as with one rank."""
    monkeypatch.setattr(startup_report, "rank_lines", lambda shares: ["rank 0 of 2", "rank 1 of 2"])
    plan = plan_cache(
        [group(GroupKind.FULL)], memory_bytes=2**20, block_size=16, max_model_len=4096, max_num_batched_tokens=9
    )
    memory = MemoryReport(device="cuda", weight_bytes=2**20, activation_bytes=0, kv_bytes=0)
    ranks = tuple(RankInfo(process_id=7, ip="10.0.0.1", memory=memory, gpu=f"GPU-{rank}") for rank in range(2))
    both = replace(memory, device="2 x cuda")
    info = ExecutorInfo(plan=plan, max_model_len=4096, vocab_size=10, eos_token_ids=(), memory=both, ranks=ranks)
    lines = startup_report.startup_report(info, model="m", cache=CacheConfig()).splitlines()
    assert "rank 1 of 2; weights 1 MiB; process 7 on 10.0.0.1, GPU-1" in lines
    assert "decode steps are launched kernel by kernel" in lines
    assert not [line for line in lines if line.startswith("operators run")]
