"""Loads a model for one rank: finds its files, reads its architecture, chooses device and dtype, and reads the rank's weights."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from transom_core.config import LoraConfig, ModelConfig
from transom_core.errors import ConfigError
from transom_core.machine.gpu_checks import gpu_problem, torch_build
from transom_core.machine.gpus import DEVICE_ORDER, expects_gpu, read_driver, visible_gpus
from transom_core.model_config.architecture import (
    Architecture,
    read_architecture,
    runnable,
    with_max_model_len,
    with_windows,
)
from transom_core.model_config.sharding import check_size
from transom_core.model_files.content import ContentPart, ContentReading
from transom_core.model_files.resolve import ModelFiles, eos_token_ids, resolve_model
from transom_kernels.cpu import threads
from transom_kernels.launch import compiles_by_rows
from transom_worker.execution.setup.load_progress import OnProgress, ProgressWeights, fetch_with_progress
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.load import load_weights

logger = logging.getLogger("transom.worker")

ONE_RANK = Parallel()

# Tensors of the text decoder's layers, without rotary frequencies and without the layers of an image encoder.
_DECODER_TENSOR = re.compile(
    r"(language_model\.)?((model|backbone)\.)?(language_model\.)?layers\.(?P<layer>\d+)\.(?!.*inv_freq)(?P<cache>self_attn\.[kv]_)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and the facts about it that the engine needs. `dtype` is torch's name, such as "bfloat16". `contents`
    is this rank's part of the contents of the model's files; it is None for a model without files."""

    model: Model
    architecture: Architecture
    dtype: str
    device: torch.device
    eos_token_ids: tuple[int, ...]
    contents: ContentPart | None = None


def load_model(
    config: ModelConfig,
    parallel: Parallel = ONE_RANK,
    on_progress: OnProgress | None = None,
    *,
    lora: LoraConfig | None = None,
    index_on_host: int = 0,
    ranks_on_host: int = 1,
) -> LoadedModel:
    """Resolve a model and load the part of it that belongs to one rank, which is number `index_on_host` of those on this host. With
    `lora` the model takes LoRA adapters.

    Raises:
        ModelError: the model's files are missing, broken or of an unknown family.  ConfigError: the configured device does not
            exist, or the model cannot be shared by this number of ranks.
    """
    files = (
        fetch_with_progress(lambda: resolve_model(config.model), on_progress)
        if on_progress
        else resolve_model(config.model)
    )
    if config.quantization == "gguf" and not files.is_gguf:
        raise ConfigError(
            f"quantization gguf was requested, but {config.model} is no GGUF file; use int8, int4 or none."
        )
    architecture = model_architecture(files, config)
    check_size(architecture, parallel.size)
    device, dtype = choose_device(config.device), choose_dtype(config.dtype, architecture)
    open_device(device)
    # Digests the files on threads while the weights load. The ranks of a host divide the files among themselves.
    contents = ContentReading(files, index=index_on_host, count=ranks_on_host)
    try:
        is_gpu = compiles_by_rows(device)  # also if one is pretended, to compile its kernels
        weights: Weights = load_weights(files, in_memory=not is_gpu, for_gpu=is_gpu)
    except BaseException:
        contents.cancel()
        raise
    if on_progress is not None:
        weights = ProgressWeights(weights, on_progress)
    try:
        model = build_model(
            architecture,
            weights,
            dtype=getattr(torch, dtype),
            device=device,
            quantization=config.quantization,
            parallel=parallel,
            lora=lora,
        )
        _warn_about_unread(weights.unread, files.path, architecture)
        part = fetch_with_progress(contents.finish, on_progress, share=1.0) if on_progress else contents.finish()
    finally:
        contents.cancel()
        weights.close()
    return LoadedModel(
        model=model,
        architecture=architecture,
        dtype=dtype,
        device=device,
        eos_token_ids=eos_token_ids(files),
        contents=part,
    )


def _warn_about_unread(unread: Sequence[str], path: Path, architecture: Architecture) -> None:
    """Warn about tensors of decoder layers that the model code did not read.

    An unread tensor, such as a bias that config.json does not mention, may mean that the model computes something wrong. Layers
    after the model's last one predict further tokens (MTP, DeepSeek V3 and GLM): nothing that the model computes depends on them,
    nor on projections of keys and values in layers that read another layer's cache (Gemma 4).
    """
    num_layers = architecture.num_layers + sum(architecture.num_feed_forwards)  # as Nemotron-H's names count
    readers = {index for index, layer in enumerate(architecture.layers) if layer.reads_cache_of is not None}
    found = [(name, match, int(match["layer"])) for name in unread if (match := _DECODER_TENSOR.match(name))]
    names = [name for name, match, layer in found if layer < num_layers and not (match["cache"] and layer in readers)]
    if names:
        logger.warning(
            "%s: %d tensors of its layers are not used, such as %s; config.json and weights may not belong together.",
            path,
            len(names),
            ", ".join(names[:3]),
        )


def model_architecture(files: ModelFiles, config: ModelConfig) -> Architecture:
    """Return the checkpoint's architecture, with the length, attention windows and chunks that the settings ask for."""
    return with_windows(
        with_max_model_len(runnable(read_architecture(files.config)), config.max_model_len),
        window=config.window,
        sinks=config.sinks,
        chunk=config.chunk,
        pattern=config.window_pattern,
    )


def choose_device(device: str) -> torch.device:
    """Return the device for a setting; `auto` chooses CUDA if this process may use a GPU.

    Raises:
        ConfigError: a GPU is to be used, and there is none, or torch or Triton cannot use it; the message says why. If a GPU
            cannot be used, `auto` does not fall back to the CPU in silence.
    """
    if device == "cpu":
        return torch.device("cpu")
    os.environ.setdefault(*DEVICE_ORDER)
    driver, torch_finds_one = read_driver(), torch.cuda.is_available()
    if device == "auto" and not torch_finds_one and not expects_gpu(driver):
        return torch.device("cpu")
    asks_driver = bool(driver.version) or not torch_finds_one  # a container may have CUDA's library without NVML
    if asks_driver and (problem := gpu_problem(driver, torch_build(), os.environ)):
        raise ConfigError(f"--device {device}: {problem}")
    if not torch_finds_one:
        raise ConfigError(
            f"--device {device}: the driver {driver.version} has GPUs, and torch {torch.__version__} cannot use them; try "
            "python -c 'import torch; torch.zeros(1).cuda()', or serve on the CPU with --device cpu."
        )
    return torch.device("cuda")


def used_gpu() -> str:
    """Return the UUID of the GPU that is "cuda" in this process: the first visible one; empty if the driver does not say."""
    return next((gpu.uuid for gpu in visible_gpus(read_driver())), "")


def open_device(device: torch.device) -> None:
    """Let CUDA start on a GPU, which shows whether it works; nothing is done for a CPU.

    Raises:
        ConfigError: CUDA cannot use the GPU, or torch is built without kernels for it.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"CUDA cannot use the GPU {used_gpu()}: {reason}. See with nvidia-smi whether it is lost or another process has it "
            "alone; reset it, or leave it out of CUDA_VISIBLE_DEVICES."
        ) from error
    built_for = torch.cuda.get_arch_list()
    major, minor = torch.cuda.get_device_capability(device)
    if built_for and not any(_runs(architecture, 10 * major + minor) for architecture in built_for):
        raise ConfigError(
            f"torch {torch.__version__} has no code for the GPU {used_gpu()}, whose compute capability is {major}.{minor}: it is "
            f"built for {', '.join(built_for)}. Install a torch for a newer CUDA (TORCH_INDEX), or use --device cpu."
        )


def _runs(architecture: str, capability: int) -> bool:
    """Return whether torch's code for an architecture runs on a GPU of this capability, such as 89 for 8.9: sm_80 runs on 8.0 to
    8.9, sm_90a on 9.0 alone, and compute_90, which the driver compiles, on 9.0 and everything newer."""
    kind, _, number = architecture.partition("_")
    built = int(number.rstrip("af"))
    if number.endswith("a"):
        return built == capability
    return built <= capability and (kind == "compute" or built // 10 == capability // 10)


def choose_dtype(dtype: str, architecture: Architecture) -> str:
    """Return the dtype for a setting; `auto` means float32 for a float32 checkpoint and bfloat16 for every other checkpoint."""
    return architecture.served_dtype if dtype == "auto" else dtype


def set_threads(num_threads: int | None, *, ranks_on_host: int = 1) -> None:
    """Set the number of threads of this process's CPU operators; None divides the usable cores among the ranks on the host.

    OMP_NUM_THREADS is ignored, because Ray sets it to an actor's share of CPUs, usually 1.
    """
    num_threads = num_threads or max(1, threads.num_usable_cores() // ranks_on_host)
    torch.set_num_threads(num_threads)
    threads.set_num_threads(num_threads)
