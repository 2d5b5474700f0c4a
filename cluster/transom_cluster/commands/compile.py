"""`transom compile`: compiles a model's kernels and the router's prefix index before the first start.

The kernels are compiled for this machine's processor, or for GPUs; the machine itself needs no GPU. Functions import the router and
the engine themselves, so that commands which do not need them start fast.
"""

import re
from typing import Annotated

import typer

from transom_cluster.commands.flags import usage_errors

CAPABILITY = re.compile(r"(\d+)\.(\d)")  # major.minor


def compile_kernels(
    model: Annotated[str, typer.Argument(help="As for `transom serve`.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="As for `transom serve`.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for `transom serve`.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda needs no GPU on this machine.")] = "cpu",
    capability: Annotated[
        str | None,
        typer.Option(help="With --device cuda: the GPUs' compute capability, such as 9.0; by default this machine's."),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="With --device cuda: as for `transom serve`.", min=1)] = 1,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="As for `transom serve`.")] = False,
    max_loras: Annotated[int, typer.Option(help="As for `transom serve`.")] = 4,
    max_lora_rank: Annotated[int, typer.Option(help="As for `transom serve`.")] = 16,
) -> None:
    """Compile a model's kernels and the router's prefix index now, so that the first start does not have to.

    The code of CPU kernels is kept in the user's cache directory (or TRANSOM_CACHE_DIR) for this processor and this version, the
    code of GPU kernels in Triton's directory (or TRITON_CACHE_DIR), and the router's beside its sources (or in NUMBA_CACHE_DIR).
    """
    from transom_cluster.routing.fleet_index import FleetPrefixIndex
    from transom_core.errors import ConfigError
    from transom_worker.precompile import precompile, precompile_for_gpu

    FleetPrefixIndex()  # Numba compiles the code of a process's first index
    lora = {"enable_lora": enable_lora, "max_loras": max_loras, "max_lora_rank": max_lora_rank}
    options = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype, **lora}
    with usage_errors():
        if device == "cuda":
            compiled = precompile_for_gpu(
                model, capability=_capability(capability), tensor_parallel_size=tensor_parallel_size, **options
            )
        elif device == "cpu":
            compiled = precompile(model, **options)
        else:
            raise ConfigError(f"--device is {device}; give cpu or cuda.")
    typer.echo(
        f"{compiled.num_kernels} kernels compiled in {compiled.seconds:.1f} s; their code is in {compiled.directory}."
        if compiled.num_kernels
        else f"Every kernel was compiled already; the code is in {compiled.directory}."
    )


def _capability(given: str | None) -> tuple[int, int]:
    """Return the given compute capability, or that of this machine's first GPU if none was given.

    Raises:
        ConfigError: the text is not two numbers, or none was given and this machine has no GPU.
    """
    from transom_core.errors import ConfigError
    from transom_core.machine.gpus import read_driver, visible_gpus

    if given is not None:
        found = CAPABILITY.fullmatch(given)
        if found is None:
            raise ConfigError(f"--capability is {given}; give two numbers with a dot, such as 9.0 for an H100.")
        return int(found[1]), int(found[2])
    gpus = [gpu for gpu in visible_gpus(read_driver()) if not gpu.error]
    if not gpus:
        raise ConfigError(
            "This machine has no GPU; name the compute capability of yours: --capability 9.0 for an H100."
        )
    return gpus[0].capability
