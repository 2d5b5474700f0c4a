"""Default batch sizes by device. They depend on the device's memory, which only the worker's host knows.

    device                       sequences   tokens of a step   steps in flight
    a GPU from 70 GiB                  256              8,192                 2
    a smaller GPU                      128              2,048                 2
    a CPU                               64              1,024                 1 (2 with several ranks)

In the time that reading the weights once takes, a GPU computes thousands of prompt tokens, and a CPU some tens. On a GPU with less
memory, the bytes that activations of longer steps would need are worth more as KV cache. The second step in flight hides the time
in which the engine handles the tokens of the first; on a CPU with one rank both would run on the same cores.
"""

from dataclasses import dataclass, replace

from transom_core.config import SchedulerConfig

LARGE_GPU_BYTES = 70 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDefaults:
    """The defaults of one device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int


def batch_defaults(gpu_bytes: int | None, *, num_ranks: int = 1) -> BatchDefaults:
    """Return the defaults for GPUs with `gpu_bytes` of memory each, or for a CPU (None)."""
    if gpu_bytes is None:
        cpu = SchedulerConfig()
        return BatchDefaults(
            max_num_seqs=cpu.max_num_seqs,
            max_num_batched_tokens=cpu.max_num_batched_tokens,
            steps_in_flight=1 if num_ranks == 1 else 2,
        )
    if gpu_bytes >= LARGE_GPU_BYTES:
        return BatchDefaults(max_num_seqs=256, max_num_batched_tokens=8192, steps_in_flight=2)
    return BatchDefaults(max_num_seqs=128, max_num_batched_tokens=2048, steps_in_flight=2)


def with_defaults(config: SchedulerConfig, defaults: BatchDefaults) -> SchedulerConfig:
    """Return the config with a value for each field that the user left to the device."""
    given = {name: getattr(defaults, name) for name in config.by_device}
    if config.steps_in_flight is None:
        given["steps_in_flight"] = defaults.steps_in_flight
    return replace(config, by_device=frozenset(), **given)
