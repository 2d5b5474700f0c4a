"""Says what each rank holds of a model's weights, before it is loaded: `transom plan --weights`.

The model is built as at a start, on torch's device `meta`, from tensors that have shapes and no data. So the integers are those
that a start reports.
"""

from dataclasses import dataclass

import torch

from transom_core.config import LoraConfig
from transom_core.errors import ConfigError
from transom_core.model_config.architecture import read_architecture, runnable
from transom_core.model_config.sharding import check_size
from transom_core.model_files.resolve import resolve_model
from transom_core.model_files.text_files import weight_files
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.load import load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The bytes of a model's weights: in its files, with their headers, and in the memory of each rank."""

    device: str
    file_bytes: int
    rank_bytes: tuple[int, ...]


def plan_weights(
    model: str, device: str, *, tensor_parallel_size: int = 1, lora: LoraConfig | None = None
) -> WeightPlan:
    """Return the bytes of a model's weights on such devices, in the dtype in which it is served. Files are mapped, not read. With
    `lora` each rank also has the slots of LoRA adapters.

    Raises:
        ModelError: the model's files are missing, broken or of an unknown family or quantisation.
        ConfigError: the device is neither "cpu" nor "cuda", or the model cannot be divided among that many ranks or is a GGUF file.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--weights is {device}; give cpu or cuda.")
    files = resolve_model(model)
    if files.is_gguf:
        raise ConfigError(f"--weights needs safetensors files; {model} is a GGUF file.")
    architecture = runnable(read_architecture(files.config))
    check_size(architecture, tensor_parallel_size)
    weights = load_weights(files, in_memory=device == "cpu", for_gpu=device == "cuda", without_data=True)
    dtype: torch.dtype = getattr(torch, architecture.served_dtype)
    ranks = [Parallel(rank=rank, size=tensor_parallel_size) for rank in range(tensor_parallel_size)]
    built = (build_model(architecture, weights, dtype=dtype, device="meta", parallel=rank, lora=lora) for rank in ranks)
    rank_bytes = tuple(model.weight_bytes for model in built)
    weights.close()
    file_bytes = sum(path.stat().st_size for path in weight_files(files.path))
    return WeightPlan(device=device, file_bytes=file_bytes, rank_bytes=rank_bytes)
