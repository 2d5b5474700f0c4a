"""A device that takes a given time for each step and computes nothing, below the real code that prepares and launches steps.

It is a queue in time: a step takes `step_s`, from when the host launches it or from the end of the last step, the later of both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.model_config.architecture import Architecture, LayerAttention
from transom_worker.execution.device_queue import Fetch
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import no_adapters
from transom_worker.models.parallel.communicator import SingleRank
from transom_worker.sampling import sampler, sharded

VOCABULARY, HEADS = 1024, 4
SPIN_S = 2e-4  # sleeping is not exact


@dataclass(frozen=True, slots=True)
class SimulatedFetch:
    """Ids that are on the host when their step has ended."""

    device: SimulatedDevice
    ends_s: float
    ids: list[int]

    def __call__(self) -> list[int]:
        """See `Fetch`."""
        self.device.wait_until(self.ends_s)
        return self.ids

    def is_ready(self) -> bool:
        """See `Fetch`."""
        return time.perf_counter() >= self.ends_s


class SimulatedDevice:
    """Computes what is launched, one after the other. As a `DeviceQueue` it gives tokens when their step has ended.

    `numbers`, which another process may share, are the seconds of a step and of a launch, those in which the device has computed,
    and whether steps are launched ahead (1) or one after the other (0).
    """

    def __init__(self, numbers: NDArray[np.float64]) -> None:
        self.numbers = numbers
        self._ends_s = 0.0

    @property
    def runs_ahead(self) -> bool:
        """See `DeviceQueue`."""
        return bool(self.numbers[3])

    def launch(self) -> None:
        """Launch a step; the host takes the time of a launch."""
        step_s, launch_s = self.numbers[:2].tolist()
        launched_s = time.perf_counter() + launch_s
        self.wait_until(launched_s)
        self._ends_s = max(launched_s, self._ends_s) + step_s
        self.numbers[2] += step_s

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        """See `DeviceQueue.fetch`."""
        return SimulatedFetch(self, self._ends_s, ids_S.tolist())

    def wait_until(self, moment_s: float) -> None:
        """Wait without working."""
        if (left_s := moment_s - time.perf_counter()) > SPIN_S:
            time.sleep(left_s - SPIN_S)
        while time.perf_counter() < moment_s:
            pass


class SimulatedModel:
    """A rank's model, whose forward pass is a launch."""

    weight_bytes = 1
    load_adapter = staticmethod(no_adapters)

    def __init__(self, architecture: Architecture, device: SimulatedDevice, *, num_ranks: int, max_rows: int) -> None:
        self.architecture, self._device = architecture, device
        self.vocab = slice(0, VOCABULARY // num_ranks)
        self._logits_RV = torch.zeros(max_rows, VOCABULARY // num_ranks)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Launch a step."""
        self._device.launch()
        return self._logits_RV[: len(batch.logit_rows)]

    hidden = logits = forward


class NoExchange(SingleRank):
    """Collectives that the device would run; they change nothing here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        """See `Communicator.gather`, on rank 0."""
        return [x] * self._size


def simulated_model(device: SimulatedDevice, *, num_ranks: int, max_rows: int) -> LoadedModel:
    """Return a model of one full-attention group, of which the device computes a rank's part."""
    layer = LayerAttention(num_heads=HEADS, num_kv_heads=HEADS, head_size=16, window=None, sinks=0)
    architecture = Architecture(
        family="simulated", hidden_size=64, intermediate_size=64, vocab_size=VOCABULARY, max_position=1 << 16,
        rms_norm_eps=1e-5, tie_embeddings=False, attention_bias=False, mlp_bias=False, checkpoint_dtype="float32", layers=(layer,),
    )  # fmt: skip
    model: Any = SimulatedModel(architecture, device, num_ranks=num_ranks, max_rows=max_rows)
    return LoadedModel(
        model=model, architecture=architecture, dtype="float32", device=torch.device("cpu"), eos_token_ids=()
    )


def simulate(runner: ModelRunner, device: SimulatedDevice, *, max_rows: int) -> None:
    """Put the device where a rank has a GPU, so that the host does what it does for one."""
    runner._queue = device
    runner._forward._replay = None
    runner._builder._kernels_read_tables = True  # else lists are made, which no GPU needs
    ids = torch.zeros(max_rows, dtype=torch.int64)  # what the sampling kernel gives; its parameters are prepared
    sampler.sample = lambda logits_SV, _: ids[: len(logits_SV)]
    sampler.uses_cpu_kernels = sharded.uses_cpu_kernels = lambda _: False
