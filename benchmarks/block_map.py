"""What the live block map costs a worker: CPU milliseconds on the engine's thread and of encoding off it, bytes a frame.

    python benchmarks/block_map.py [--blocks 100000] [--json results.json]

A cache full of blocks of three groups, with sequences that decode; a frame every so many steps. "first" is what begins it: the
longest of the copies, and a whole frame; "picture" the copy that a step waits for; "update" what changed and its encoding.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from transom_core.config import SchedulerConfig
from transom_core.contract import Request, SamplingParams
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepResult
from transom_worker.telemetry.blockmap.encoder import Encoder, WorkerIdentity
from transom_worker.telemetry.blockmap.log import BlockMapLog
from transom_worker.telemetry.blockmap.snapshot import SnapshotTaker

UNIT = 16
STRIDE_BYTES = 64 * 1024
BLOCKS_PER_PAGE = 32
STEPS_A_FRAME = 10
T = TypeVar("T")


def main(
    blocks: Annotated[int, typer.Option(help="Blocks that the pool holds.")] = 100_000,
    sequences: Annotated[list[int] | None, typer.Option(help="Running sequences; 64 and 256 if unset.")] = None,
    frames: Annotated[int, typer.Option(help="Frames to measure.")] = 30,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Measure and print a table."""
    rows = [measure(blocks, count, frames) for count in sequences or [64, 256]]
    print("| blocks | sequences | first picture | first frame | picture | update | records | bytes | whole frame |")
    print("| ---: " * 9 + "|")
    for row in rows:
        print(
            f"| {row['blocks']:,} | {row['sequences']} | {row['first_picture_ms']:.1f} ms | {row['first_frame_ms']:.0f} ms "
            f"| {row['picture_ms']:.2f} ({row['worst_picture_ms']:.2f}) ms | {row['update_ms']:.1f} ms "
            f"| {row['records']:,} | {row['bytes']:,} | {row['whole_bytes']:,} |"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


def measure(num_blocks: int, num_sequences: int, num_frames: int) -> dict[str, Any]:
    """One row: the medians over frames, and the worst picture."""
    scheduler = filled(num_blocks, num_sequences)
    gc.collect()
    gc.freeze()  # as the engine does after start
    log = BlockMapLog()
    scheduler.admission.listeners.append(log)
    snapshots = SnapshotTaker(scheduler, log.events)
    encoder = Encoder(WorkerIdentity("w", "m"), scheduler.cache.layout, log.history)
    snapshots.begin()
    first_picture_ms, first_update_ms = 0.0, 0.0
    for group in range(len(scheduler.cache.pools)):
        copy, took_ms = timed(lambda group=group: snapshots.copy(group))  # type: ignore[misc]
        first_picture_ms = max(first_picture_ms, took_ms)
        first_update_ms += timed(lambda group=group, copy=copy: encoder.start(group, copy))[1]  # type: ignore[misc]
    snapshot, took_ms = timed(snapshots.take)
    first_picture_ms = max(first_picture_ms, took_ms)
    first_update_ms += timed(lambda: encoder.update(snapshot))[1]
    whole, whole_ms = timed(lambda: encoder.whole(time.time()))
    picture_ms, update_ms, sizes, records = [], [], [], []
    for _ in range(num_frames):
        run(scheduler, STEPS_A_FRAME)
        snapshot, took_ms = timed(snapshots.take)
        picture_ms.append(took_ms)
        frame, took_ms = timed(lambda snapshot=snapshot: encoder.update(snapshot))  # type: ignore[misc]
        update_ms.append(took_ms)
        sizes.append(len(frame.numbered(1)))
        records.append(json.loads(b"{" + frame.header)["arrays"][1][1] // 5)
    return {
        "blocks": sum(pool.num_leased_blocks for pool in scheduler.cache.pools),
        "sequences": scheduler.num_running,
        "first_picture_ms": first_picture_ms,
        "first_frame_ms": first_update_ms + whole_ms,
        "picture_ms": statistics.median(picture_ms),
        "worst_picture_ms": max(picture_ms),
        "update_ms": statistics.median(update_ms),
        "records": int(statistics.median(records)),
        "bytes": int(statistics.median(sizes)),
        "whole_bytes": len(whole.numbered(1)),
    }


def filled(num_blocks: int, num_sequences: int) -> Scheduler:
    """A scheduler whose pool is full: long running sequences, and the cache of others before them."""
    groups = (
        ("full", GroupKind.FULL, {}),
        ("window_1024", GroupKind.WINDOW, {"window": 1024}),
        ("window_4096", GroupKind.WINDOW, {"window": 4096}),
    )
    layouts = tuple(
        GroupLayout(
            spec=GroupSpec(name=name, kind=kind, layers=(index,), block_size=UNIT, **rule),  # type: ignore[arg-type]
            block_bytes=STRIDE_BYTES,
            stride_bytes=STRIDE_BYTES,
            layers=(),
        )
        for index, (name, kind, rule) in enumerate(groups)
    )
    page_bytes = STRIDE_BYTES * BLOCKS_PER_PAGE
    layout = ArenaLayout(page_bytes=page_bytes, num_pages=num_blocks // BLOCKS_PER_PAGE, groups=layouts)
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=65_536)
    scheduler = Scheduler(config, layout, block_size=UNIT, max_model_len=65_536, enable_prefix_caching=True)
    rng = random.Random(3)
    length = num_blocks * UNIT // 4 // num_sequences
    for number in range(5 * num_sequences):
        last = number >= 4 * num_sequences  # these stay
        shared = [number % 7] * 1024
        prompt = (*shared, *(rng.randrange(50_000) for _ in range(length - 1024 if last else length)))
        scheduler.add(
            Request(
                request_id=f"request-{number}",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=30_000 if last else 2),
                seed=0,
            )
        )
    while scheduler.num_waiting or scheduler.waiting_tokens:
        run(scheduler, 1)
    return scheduler


def run(scheduler: Scheduler, num_steps: int) -> None:
    """Steps whose tokens mean nothing."""
    for _ in range(num_steps):
        plan = scheduler.schedule()
        assert plan is not None
        result = StepResult(step_id=plan.step_id, sampled_ids=[5] * sum(plan.sample))
        for output in scheduler.receive(result):
            if output.at_limit:
                scheduler.abort(output.request_id)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result, and milliseconds."""
    begin_s = time.thread_time()
    result = call()
    return result, (time.thread_time() - begin_s) * 1000


if __name__ == "__main__":
    typer.run(main)
