"""Panels of the disk tier, for the dashboard of the KV cache."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.panels import About, lines
from dashboards.queries import WORKER, Query, rate, split, total

DISK = Section(
    title="Disk tier",
    panels=[
        lines(
            About(
                title="Blocks on disk by event",
                shows="KV blocks of the disk tier, a second: written behind, read for prompts, evicted for newer ones, and what "
                "went wrong.",
                act="`broken`, `failed`: the disk or its file system; those prompts are computed. `dropped`: the disk is slower "
                "than blocks leave the memory. Far more `evicted` than `read`: a larger `--disk-space`.",
            ),
            split(rate, "transom_disk_blocks_total", WORKER, "event"),
            "ops",
        ),
        lines(
            About(
                title="Ranks that write to disk",
                shows="1 for each rank that writes to its disk tier, 0 for a minute after a write has failed.",
                act="0 with `--disk-cache`: see the worker's log; the directory is full, or gone.",
            ),
            [Query(expr=total("transom_disk_usable", WORKER, "worker", "rank"), legend="{{worker}} rank {{rank}}")],
            "short",
        ),
    ],
)
