"""Checks the settings before the server starts, so that a wrong setting is refused within a second, and not after Ray has started
and the weights are loaded."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from transom_cluster.http.api_keys import ADMIN_FLAG, KEY_VARIABLES, check_key_variables, read_key_file
from transom_cluster.serve.worker_resources import check_gpus
from transom_core.contract import check_kv_policy
from transom_core.contract.kv_policy import kv_policy_from_json
from transom_core.errors import ConfigError, RequestError
from transom_core.machine.gpu_checks import gpu_problem, torch_build
from transom_core.machine.gpus import GpuDriver, expects_gpu, read_driver
from transom_core.machine.host_memory import available_host_bytes
from transom_core.settings.settings import Settings

if TYPE_CHECKING:
    from transom_core.model_config.architecture import Architecture


def check_start(settings: Settings) -> Architecture:
    """Check the API keys, the address, the machine's GPUs and memory, the LoRA adapters' configs, and the model: its files,
    architecture, tokenizer, chat template and markup. Return the architecture.

    Raises:
        RequestError: an adapter is missing or not supported.
        ConfigError: a setting does not fit this machine or this model.
        ModelError: the model is missing, incomplete, or not supported.
    """
    from transom_cluster.openai.answer.answer_markup import AnswerMarkup
    from transom_core.model_config.architecture import (
        choose_max_model_len,
        kv_policy_obstacle,
        read_architecture,
        runnable,
        with_windows,
    )
    from transom_core.model_files.adapter_files import resolve_adapter
    from transom_core.model_files.resolve import check_weights, resolve_text_files
    from transom_core.telemetry.tracing import check_tracing
    from transom_core.text.tokenizer import Tokenizer

    check_api_keys(settings)
    if (tracing := settings.server_config().tracing) is not None:
        check_tracing(tracing)
    if problem := port_problem(settings.host, settings.port):
        raise ConfigError(problem)
    if settings.quantization != "none" and settings.dtype == "float16":
        raise ConfigError(
            f"--quantization {settings.quantization} runs in bfloat16 or float32, not with --dtype float16; leave one of them out."
        )
    check_machine(settings, read_driver())
    for _, path in settings.lora_modules:
        resolve_adapter(path, max_rank=settings.max_lora_rank)
    files = resolve_text_files(settings.model)
    if Path(settings.model).expanduser().is_dir():
        check_weights(files.path)
    architecture = with_windows(
        runnable(read_architecture(files.config)),
        window=settings.window,
        sinks=settings.sinks,
        chunk=settings.chunk,
        pattern=settings.window_pattern,
    )
    for workers in (settings, *settings.groups()):
        check_shards(workers, architecture)
    check_host_tiers(settings)
    max_model_len = choose_max_model_len(settings.max_model_len, architecture)
    check_default_policy(settings, max_model_len, kv_policy_obstacle(architecture))
    tokenizer = Tokenizer.load(files)
    tokenizer.check_chat_template()
    config = settings.server_config()
    AnswerMarkup.choose(tokenizer, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser)
    return architecture


def check_machine(settings: Settings, driver: GpuDriver) -> None:
    """If workers are to run on GPUs, check that torch and Triton can use this machine's GPUs and that there are enough.

    Raises:
        ConfigError: the GPUs cannot be used or are too few, or a setting is not supported on GPUs.
    """
    if settings.device == "cpu" or (settings.device == "auto" and not expects_gpu(driver)):
        return
    if settings.quantization != "none":
        raise ConfigError(
            f"--quantization {settings.quantization} runs on CPUs, and --device is {settings.device} on a machine with "
            f"{len(driver.gpus)} GPUs; leave it out, or give --device cpu."
        )
    if problem := gpu_problem(driver, torch_build(), os.environ) or check_gpus(settings, driver):
        raise ConfigError(f"--device {settings.device}: {problem}")


def check_host_tiers(settings: Settings) -> None:
    """Check that the host tiers of all workers together fit into this host's free memory. A rank itself can check only its own
    tier.

    Raises:
        ConfigError: they do not fit.
    """
    workers = [settings, *settings.groups()]
    num_ranks = sum(one.replicas * one.tensor_parallel_size for one in workers)
    needed = sum(
        one.replicas * one.tensor_parallel_size * one.engine_config().cache.swap_space_bytes for one in workers
    )
    if needed and needed > (free_bytes := available_host_bytes()):
        raise ConfigError(
            f"--swap-space: the host tiers of all {num_ranks} ranks of this host take {needed} bytes, and it has "
            f"{free_bytes} bytes free. Give at most {free_bytes / num_ranks / 2**30:.2f}GiB a rank, or fewer workers."
        )


def check_shards(settings: Settings, architecture: Architecture) -> None:
    """Check that the model can be split over a worker's ranks, and that its KV groups can have the requested number formats.

    Raises:
        ConfigError: there are too many ranks, or the model does not have a group of `--kv-cache-dtype`, or not in this format.
    """
    from transom_core.model_config.sharding import check_size
    from transom_worker.planner.blocks import cache_groups
    from transom_worker.planner.layer_groups import check_runs

    check_size(architecture, settings.tensor_parallel_size)
    dtype = architecture.served_dtype if settings.dtype == "auto" else settings.dtype
    groups = cache_groups(
        architecture,
        block_size=settings.block_size,
        dtype=dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        hybrid=settings.hybrid_kv_cache,
    )
    check_runs(groups, dtype)


def check_default_policy(settings: Settings, max_model_len: int, obstacle: str) -> None:
    """Check that the model supports the default KV policy. `obstacle` says why the model supports no policy; empty if it supports
    them.

    Raises:
        ConfigError: the model does not support the policy.
    """
    policy = None if settings.kv_policy is None else kv_policy_from_json(settings.kv_policy)
    try:
        check_kv_policy(
            policy, kv_quality=False, block_size=settings.block_size, max_model_len=max_model_len, obstacle=obstacle
        )
    except RequestError as error:
        raise ConfigError(f"--kv-policy: {error}") from None


def check_api_keys(settings: Settings) -> None:
    """Check that a server whose settings ask for API keys gets some.

    Raises:
        ConfigError: a key is blank (for example from an unset variable), a file has no key, or a setting or a variable is empty.
    """
    for name in ("api_key_file", "admin_api_key_file"):
        if name in settings.model_fields_set and getattr(settings, name) is None:
            raise ConfigError(
                f"{name} has no value; give a file with one key per line, or leave it out to serve without keys."
            )
    check_key_variables(os.environ, settings.model_dump(include=set(KEY_VARIABLES)))
    if not all(key.strip() for key in settings.api_key):
        raise ConfigError("--api-key is empty; give a key, or leave it out to serve without one.")
    if settings.api_key_file is not None:
        read_key_file(settings.api_key_file)
    if settings.admin_api_key_file is not None:
        read_key_file(settings.admin_api_key_file, flag=ADMIN_FLAG)


def port_problem(host: str, port: int) -> str | None:
    """Return the reason why the server cannot listen on the address; None if it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return f"Port {port} on {host} cannot be used ({error.strerror}); choose another with --host or --port."
    return None
