"""What Ray's grant of GPUs means for a worker: the device that it computes on, and its share of a GPU that workers share.

A *grant* is the number of GPUs of an actor (`num_gpus`) or of a bundle of a placement group. Ray sets CUDA_VISIBLE_DEVICES to the
granted GPUs. `transom serve` grants a worker one GPU for each rank; a Serve config may say otherwise.

    grant     one rank                                  each of several ranks
    0         refused, unless the worker is for CPUs    refused, unless the worker is for CPUs
    0.5       half of what a worker may use of a GPU    refused: nccl wants a GPU for each rank
    1         a GPU, or a part of one (MIG)             the same
    2         refused: one would be idle                refused
"""

from dataclasses import replace

from transom_core.config import EngineConfig
from transom_core.errors import ConfigError
from transom_core.machine.gpus import expects_gpu, read_driver


def with_grant(config: EngineConfig, num_gpus: float) -> EngineConfig:
    """Return the config of a rank to whose process Ray has granted `num_gpus` GPUs.

    Raises:
        ConfigError: the rank cannot compute with this grant.
    """
    model, num_ranks = config.model, config.ranks.size
    if model.device == "cpu":
        return config
    if num_gpus == 0:
        if model.device == "cuda":
            raise ConfigError(
                "Ray grants 0 GPUs, and the device is cuda; grant 1 (num_gpus, or GPU of a bundle), or say device: cpu."
            )
        driver = read_driver()
        if expects_gpu(driver):  # a GPU that is not granted may be another worker's
            raise ConfigError(
                f"Ray grants 0 GPUs, and this host has {len(driver.gpus)}; start Ray with them (ray start --num-gpus) and say "
                "device: cuda, or say device: cpu."
            )
        return replace(config, model=replace(model, device="cpu"))
    if num_gpus > 1:
        raise ConfigError(
            f"Ray grants {num_gpus:g} GPUs, and a rank uses one; grant 1, and set tensor_parallel_size to use more."
        )
    if num_gpus < 1 < num_ranks:
        raise ConfigError(
            f"Ray grants {num_gpus:g} GPUs, and each of {num_ranks} ranks needs a whole one; grant 1 to each."
        )
    return replace(config, model=replace(model, device="cuda"), cache=replace(config.cache, gpu_share=num_gpus))
