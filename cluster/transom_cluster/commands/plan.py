"""`transom plan`: computes the memory of a model's KV cache from its config, and how many requests fit."""

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from transom_cluster.commands.flags import usage_errors


def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a folder that has one, or any model that `transom serve` takes.")
    ],
    memory: Annotated[str, typer.Option(help="KV pool of each rank: bytes, or such as 512MiB.")] = "40GiB",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks; the plan is for the one with most KV.")] = 1,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt + answer; the model's own limit if unset.")
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto (the model's), bfloat16, float16, float32, fp8, int8 or int4; or by group: window=bfloat16,full=int8."
        ),
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Tokens per KV block and hash block.")] = 16,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU, such as 80GiB: the defaults below are those of such a GPU.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens computed per step; unset, as `transom serve` has it.")
    ] = None,
    steps_in_flight: Annotated[
        int | None, typer.Option(min=1, max=2, help="Unset, 2 on GPUs and with several ranks, else 1.")
    ] = None,
    hybrid_kv_cache: Annotated[bool, typer.Option(help="Off: every layer keeps full length.")] = True,
    swap_space: Annotated[str, typer.Option(help="Host tier of each rank: GiB, or such as 512MiB.")] = "0",
    kv_policy: Annotated[
        str | None,
        typer.Option(
            help='KV policy of all requests, as JSON, such as {"type": "window", "sinks": 4, "window": 1024}.'
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda: also say what each rank holds of the weights there. Needs the files, and reads no data."
        ),
    ] = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="With --weights: also the slots of adapters.")
    ] = False,
    max_loras: Annotated[int, typer.Option(min=1, max=64, help="Slots of each rank.")] = 4,
    max_lora_rank: Annotated[int, typer.Option(min=8, max=256, help="The largest rank of an adapter.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan the KV cache of MODEL: bytes by group, pages, and concurrency by context length. Needs no weights without --weights."""
    from transom_cluster.commands.plan_report import print_plan
    from transom_core.config import LoraConfig
    from transom_core.contract import check_kv_policy
    from transom_core.contract.kv_policy import kv_policy_from_json
    from transom_core.kv_cache.retention import Retention
    from transom_core.model_config.architecture import kv_policy_obstacle, read_architecture
    from transom_core.model_files.resolve import resolve_config
    from transom_core.settings.byte_sizes import parse_bytes
    from transom_core.settings.device_defaults import batch_defaults
    from transom_core.settings.settings import gibibytes
    from transom_worker.kvcache.policy_retentions import retention_under
    from transom_worker.planner.plan import plan_from_config

    lora = LoraConfig(max_loras=max_loras, max_lora_rank=max_lora_rank) if enable_lora else None
    with usage_errors():
        config = resolve_config(model)
        policy = None if kv_policy is None else kv_policy_from_json(kv_policy)
        gpu_bytes = None if gpu_memory is None else parse_bytes(gpu_memory, name="--gpu-memory")
        defaults = batch_defaults(gpu_bytes, num_ranks=tensor_parallel_size)
        result = plan_from_config(
            config,
            memory_bytes=parse_bytes(memory, name="--memory"),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens or defaults.max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            kv_cache_dtype=kv_cache_dtype,
            hybrid=hybrid_kv_cache,
            steps_in_flight=steps_in_flight or defaults.steps_in_flight,
            host_bytes=int(gibibytes(swap_space, name="--swap-space") * 2**30),
            retention_of=Retention if policy is None else partial(retention_under, policy),
        )
        check_kv_policy(
            policy,
            kv_quality=False,
            block_size=block_size,
            max_model_len=result.max_model_len,
            obstacle=kv_policy_obstacle(read_architecture(config)),
        )
        weight_plan = None
        if weights is not None:
            from transom_worker.execution.setup.weight_plan import plan_weights  # imports torch

            weight_plan = plan_weights(model, weights, tensor_parallel_size=tensor_parallel_size, lora=lora)
    policy_text = None if policy is None else policy.text
    if as_json:
        held = {} if weight_plan is None else {"weights": asdict(weight_plan)}
        typer.echo(json.dumps({"model": model, "kv_policy": policy_text, **result.as_json(), **held}))
    else:
        print_plan(result, model, kv_policy=policy_text, weights=weight_plan)
