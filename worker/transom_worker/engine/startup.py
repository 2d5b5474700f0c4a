"""Builds a running engine from its config: model files, ranks, metrics, tracing, and the start-up report in the log."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from transom_core.clock import steady_time_s
from transom_core.config import CacheConfig, EngineConfig
from transom_core.kv_cache.groups import GroupSpec
from transom_core.machine.gpus import read_driver, visible_gpus
from transom_core.model_config.rank_shares import rank_lines
from transom_core.model_files.resolve import resolve_text_files
from transom_core.settings.device_defaults import batch_defaults, with_defaults
from transom_core.telemetry.tracing import Tracing
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.execution.executor_factory import create_executor
from transom_worker.planner.plan import CachePlan, Concurrency, GroupPlan
from transom_worker.telemetry.engine_timelines import Clock
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics
from transom_worker.telemetry.timeline_exporter import timeline_exporter

logger = logging.getLogger("transom.worker")


def build_engine(
    config: EngineConfig,
    *,
    model_name: str | None = None,
    worker: str = "0",
    executor: Executor | None = None,
    clock: Clock = steady_time_s,
) -> Engine:
    """Load a model and start its engine, for a replica, for offline use and for benchmarks.

    `executor` is used if it is given; else one is made as `config` says. `clock` is the engine's.

    Raises:
        ConfigError, ModelError: a setting or the checkpoint is wrong. All ranks have been ended.
    """
    tracing = None if config.tracing is None else Tracing(config.tracing, role="worker", name=worker)
    begin_s = time.perf_counter()
    config = resolve_for_device(config)
    files = resolve_text_files(config.model.model)  # the ranks load the weights
    metrics = EngineMetrics(model=model_name or config.model.model, worker=worker, compat=config.metrics_compat)
    tokenizer, executor = Tokenizer.load(files), executor or create_executor(config)
    try:
        engine = Engine(config, executor, tokenizer, metrics, worker, clock=clock)
        engine.model_config = files.config
        engine.report = startup_report(
            engine.info, model=model_name or files.name, cache=config.cache, transfers=config.transfer.is_on
        )
        engine.timelines.exporter = timeline_exporter(config, worker, tracing)
    except BaseException:
        executor.shutdown()
        raise
    metrics.ready(time.perf_counter() - begin_s)
    for line in engine.report.splitlines():
        logger.info(line)
    return engine


def resolve_for_device(config: EngineConfig) -> EngineConfig:
    """Return the config with values for the settings that the user left to the device (`auto`).

    This is done in the worker's process, since the router's process may run on a machine without the device.

    Raises:
        ConfigError: the device cannot be used.
    """
    from transom_worker.execution.setup.model_loading import choose_device  # imports torch

    ranks, model, gpu_bytes = config.ranks, config.model, None
    are_actors = ranks.launcher == "ray" and ranks.size > 1  # they have the GPUs, and this process may see none
    if not are_actors:
        model = replace(model, device="cuda" if choose_device(model.device).type == "cuda" else "cpu")
    if model.device == "cuda":
        gpus = visible_gpus(read_driver(), {} if are_actors else os.environ)
        gpu_bytes = min((int(gpu.memory_bytes * config.cache.gpu_share) for gpu in gpus), default=0)
    defaults = batch_defaults(gpu_bytes, num_ranks=ranks.size)
    return replace(config, model=model, scheduler=with_defaults(config.scheduler, defaults))


_KERNELS = {"cpu": "kernels compiled for this CPU", "torch": "torch's own", "triton": "Triton's kernels, interpreted"}
_COLUMNS = (
    "group", "layers", "keep", "format", "bytes per token", "block", "bytes per block", "per page",
    "at most per sequence",
)  # fmt: skip


def startup_report(info: ExecutorInfo, *, model: str, cache: CacheConfig, transfers: bool = False) -> str:
    """Return the report that a worker logs: memory by purpose, a table of the cache groups as `transom plan` shows it, how many
    sequences fit the pool at once, the host and disk tiers, and, if the worker `transfers`, how KV blocks come from other workers.

    A *group* has layers that keep the KV of the same tokens for the same time. A *page* is a part of the KV pool; it is leased to
    one group at a time, and divided into that group's blocks.
    """
    memory, plan = info.memory, info.plan
    pool_bytes = plan.page_bytes * plan.num_pages
    each = " on each rank" if len(info.ranks) > 1 else ""
    lines = [
        f"{model} on {memory.device}: weights {_mib(memory.weight_bytes)}, activations {_mib(memory.activation_bytes)}, "
        f"KV pool {_mib(pool_bytes)}{each} ({plan.num_pages:,} pages of {plan.page_bytes:,} bytes, {plan.waste:.1%} waste)",
        *_rank_lines(info),
        *_group_table(plan),
        f"one sequence of {plan.max_model_len:,} tokens takes {plan.request_bytes:,} bytes; at once run "
        f"{_points(plan.concurrency)}",
        *_tier_lines(plan, cache),
    ]
    if transfers and plan.host_layout is not None:
        how = "read by NIXL" if info.memories else "sent through Ray; NIXL (transom[transfer]) is not used"
        lines.append(f"KV blocks of other workers are {how}")
    device = info.ranks[0].memory.device if info.ranks else memory.device  # not "2 x cuda"
    if device == "cpu":
        compiled = f" (compiling them took {info.compile_s:.1f} s, once)" if info.compile_s else ""
        lines.append(f"operators run as {_KERNELS[info.kernels]}{compiled}")
    if device.startswith("cuda"):
        lines.append(
            f"decode steps and small steps with prompts are replayed from {info.num_graphs:,} CUDA graphs"
            if info.num_graphs
            else "decode steps are launched kernel by kernel"
        )
    if plan.in_flight_bytes:
        lines.append(
            f"a step of {plan.max_num_batched_tokens:,} tokens takes {plan.in_flight_bytes:,} bytes more while it runs; "
            f"lost windows are restored by computing {plan.repair_tokens:,} tokens"
        )
    return "\n".join(lines)


def _rank_lines(info: ExecutorInfo) -> list[str]:
    """Return a line for each rank with its shard of the model, its memory and its process; no lines for a single rank."""
    if len(info.ranks) < 2:
        return []
    lines = [
        f"{held}; weights {_mib(rank.memory.weight_bytes)}; process {rank.process_id} on {rank.ip}"
        + (f", {rank.gpu}" if rank.gpu else "")
        for held, rank in zip(rank_lines(info.plan.ranks), info.ranks, strict=True)
    ]
    return [*lines, f"on several ranks: {', '.join(info.plan.replicated)}"]


def _tier_lines(plan: CachePlan, cache: CacheConfig) -> list[str]:
    """Return a line for the host tier and one for the disk tier, if they exist."""
    lines = []
    if plan.host_layout is not None:
        each = " on each rank" if plan.tensor_parallel_size > 1 else ""
        lines.append(
            f"host tier {_mib(plan.host_layout.pool_bytes)}{each} ({plan.host_layout.num_pages:,} pages) for evicted prefixes and "
            f"preempted sequences: the KV of {_points(plan.host_concurrency)}"
        )
    if cache.disk_cache is not None:
        lines.append(
            f"disk tier in {cache.disk_cache}, up to {_mib(cache.disk_space_bytes)} for all processes that use it: the KV of about "
            f"{_on_disk(plan, cache.disk_space_bytes)}"
        )
    return lines


def _group_table(plan: CachePlan) -> list[str]:
    rows = [_group_row(part, group.spec) for part, group in zip(plan.groups, plan.layout.groups, strict=True)]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_COLUMNS, *rows)
    ]


def _group_row(part: GroupPlan, spec: GroupSpec) -> tuple[str, ...]:
    return (
        part.name,
        f"{part.num_layers}",
        _kept(spec),
        part.dtype,
        f"{part.bytes_per_token:,.0f}",
        f"{part.block_tokens} tokens",
        f"{part.block_bytes:,}",
        f"{part.blocks_per_page}",
        f"{part.peak_blocks:,} blocks",
    )


def _kept(spec: GroupSpec) -> str:
    if spec.keeps_everything:
        return f"an entry per {spec.ratio} tokens" if spec.ratio else "all tokens"
    if spec.ratio:
        return f"up to {(1 + spec.overlap) * spec.ratio:,} tokens"
    sinks = f" + first {spec.sinks}" if spec.sinks else ""
    return f"{spec.window or spec.chunk:,} tokens{sinks}"


def _points(points: Sequence[Concurrency]) -> str:
    return ", ".join(f"{point.requests:,} of {point.length:,}" for point in points)


def _on_disk(plan: CachePlan, space_bytes: int) -> str:
    """Say how many prefixes of each length fit the disk, on which each rank has the files of its own share."""
    ranks = plan.tensor_parallel_size
    return ", ".join(
        f"{space_bytes // (ranks * point.request_bytes):,} of {point.length:,}" for point in plan.concurrency
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
