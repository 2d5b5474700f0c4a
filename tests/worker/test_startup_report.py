"""The start-up report's integers."""

from __future__ import annotations

import pytest

from transom_worker.execution.executor import ExecutorInfo, MemoryReport
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout
from transom_worker.startup_report import blocks_at_length, startup_report


def spec(kind: GroupKind, **sizes: int) -> GroupSpec:
    return GroupSpec(name=str(kind), kind=kind, layers=(0, 1), block_size=16, **sizes)


@pytest.mark.parametrize(
    ("group", "num_tokens", "expected"),
    [
        (spec(GroupKind.FULL), 0, 1),
        (spec(GroupKind.FULL), 15, 1),
        (spec(GroupKind.FULL), 16, 2),
        (spec(GroupKind.FULL), 1000, 63),
        (spec(GroupKind.WINDOW, window=128), 1000, 9),
        (spec(GroupKind.WINDOW, window=128), 1024, 9),
        (spec(GroupKind.SINKS_WINDOW, window=128, sinks=4), 1000, 10),
        (spec(GroupKind.CHUNK, chunk=64), 128, 1),
    ],
)
def test_blocks_of_one_sequence(group: GroupSpec, num_tokens: int, expected: int) -> None:
    assert blocks_at_length(group, num_tokens) == expected


def test_report_says_where_memory_went() -> None:
    groups = tuple(
        GroupLayout(spec=s, block_bytes=1024, stride_bytes=1024, layers=())
        for s in (spec(GroupKind.FULL), spec(GroupKind.WINDOW, window=32))
    )
    info = ExecutorInfo(
        layout=ArenaLayout(page_bytes=4096, num_pages=256, groups=groups),
        max_model_len=1024,
        vocab_size=10,
        eos_token_ids=(),
        memory=MemoryReport(device="cpu", weight_bytes=2**20, activation_bytes=2**21, kv_bytes=2**20),
    )
    report = startup_report(info, model="m")
    assert "weights 1 MiB, activations 2 MiB, KV pool 1 MiB (256 pages of 4 KiB)" in report
    assert "group window: 2 layers keep 32 tokens; blocks of 16 tokens, 1,024 bytes" in report
    assert "15,420 tokens in sequences of 1,024 (15.1 of them at once)" in report  # 1,024 blocks over 65 + 3
