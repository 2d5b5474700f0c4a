"""Builds a running engine from its config: model files, ranks, metrics, tracing, and the start-up report in the log."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

from transom_core.clock import steady_time_s
from transom_core.config import EngineConfig
from transom_core.machine.gpus import read_driver, visible_gpus
from transom_core.model_files.resolve import resolve_text_files
from transom_core.settings.device_defaults import batch_defaults, with_defaults
from transom_core.telemetry.tracing import Tracing
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup_report import startup_report
from transom_worker.execution.executor import Executor
from transom_worker.execution.executor_factory import create_executor
from transom_worker.telemetry.engine_timelines import Clock
from transom_worker.telemetry.metrics import EngineMetrics
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
    metrics = EngineMetrics(model=model_name or config.model.model, worker=worker)
    tokenizer, executor = Tokenizer.load(files), executor or create_executor(config)
    try:
        engine = Engine(config, executor, tokenizer, metrics, worker, clock=clock)
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
    if ranks.rank_process is None:
        ranks = replace(ranks, rank_process=model.device == "cuda")
    defaults = batch_defaults(gpu_bytes, num_ranks=ranks.size)
    return replace(config, model=model, ranks=ranks, scheduler=with_defaults(config.scheduler, defaults))
