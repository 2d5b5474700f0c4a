"""Metric families of a worker's ranks, the processes that split every layer of its model: memory, time, steps and identity."""

import platform
from collections.abc import Iterator

from prometheus_client.core import Metric

from transom_core.telemetry.own_labels import OwnLabels, crossed
from transom_worker.execution.executor import DiskUsage, RankReport

DISK_EVENTS = ("written", "read", "missing", "broken", "dropped", "failed", "evicted")  # counts of `DiskUsage`


def rank_families(own: OwnLabels, ranks: tuple[RankReport, ...]) -> Iterator[Metric]:
    """Yield every metric family of the ranks."""
    named = [(str(rank), report) for rank, report in enumerate(ranks)]
    yield own.gauges(
        "transom_rank_memory_bytes",
        "Bytes of device memory (of the process on CPUs) that a rank has: weights, kv (the whole pool) and other "
        "(resident or reserved beyond these two).",
        ("rank", "kind"),
        crossed(
            {
                rank: {
                    "weights": report.info.memory.weight_bytes,
                    "kv": report.info.memory.kv_bytes,
                    "other": report.usage.other_bytes,
                }
                for rank, report in named
            }
        ),
    )
    yield from _work(own, named)
    yield from _disk(own, named)
    yield own.gauges(
        "transom_rank_info",
        "A rank's device, process id and host; the value is always 1.",
        ("rank", "device", "pid", "host"),
        [
            ((rank, report.info.memory.device, str(report.info.process_id), _host(report.info.ip)), 1)
            for rank, report in named
        ],
    )


def _work(own: OwnLabels, named: list[tuple[str, RankReport]]) -> Iterator[Metric]:
    """Yield the families of each rank's seconds and steps since its process began."""
    yield own.counters(
        "transom_rank_forward_seconds",
        "Seconds of a rank in forward passes, waiting for other ranks included.",
        ("rank",),
        [((rank,), report.usage.forward_s) for rank, report in named],
    )
    yield own.counters(
        "transom_rank_busy_seconds",
        "Seconds of a rank in steps.",
        ("rank",),
        [((rank,), report.usage.busy_s) for rank, report in named],
    )
    yield own.counters(
        "transom_rank_steps",
        "Steps of a rank: launched (by the host, kernel by kernel) or replayed (from a CUDA graph or a recorded "
        "program).",
        ("rank", "forward"),
        crossed(
            {
                rank: {"launched": report.usage.num_eager_steps, "replayed": report.usage.num_graph_steps}
                for rank, report in named
            }
        ),
    )
    yield own.counters(
        "transom_decode_steps",
        "Steps of a rank without prompts: replayed, or eager (kernel by kernel, which is slower).",
        ("rank", "mode"),
        crossed(
            {
                rank: {"eager": report.usage.num_eager_decodes, "replayed": report.usage.num_graph_decodes}
                for rank, report in named
            }
        ),
    )
    yield own.gauges(
        "transom_rank_wrong_graphs",
        "Sizes of steps that run eagerly because their CUDA graph gave wrong logits twice.",
        ("rank",),
        [((rank,), report.usage.num_wrong_graphs) for rank, report in named],
    )


def _disk(own: OwnLabels, named: list[tuple[str, RankReport]]) -> Iterator[Metric]:
    """Yield the families of what happened to each rank's blocks on the disk since its process began; zeros without a disk tier."""
    found = [(rank, report.usage.disk or DiskUsage(is_usable=False)) for rank, report in named]
    yield own.counters(
        "transom_disk_blocks",
        "KV blocks of a rank's disk tier: written, read, missing (asked for and not there), broken (the file was "
        "damaged, and removed), dropped (writing did not keep up), failed (a write ended with an error) and evicted "
        "(removed for newer ones).",
        ("rank", "event"),
        [((rank, event), getattr(disk, f"num_{event}")) for rank, disk in found for event in DISK_EVENTS],
    )
    yield own.gauges(
        "transom_disk_usable",
        "Whether a rank writes to its disk tier (1); 0 for a minute after a write has failed, and where there is no "
        "disk tier.",
        ("rank",),
        [((rank,), int(disk.is_usable)) for rank, disk in found],
    )


def _host(address: str) -> str:
    """Return a rank's host: its IP address, or this machine's name if the address is a loopback address."""
    return platform.node() if address.startswith("127.") else address
