"""How much of its time a GPU computes while the engine decodes: the real engine over a simulated device.

    python -m benchmarks.gpu.host_gaps [--seconds 3]

The device is a queue in time: a step takes `device` milliseconds, from when the host launches it or from the end of the last step,
the later of both. All host work is real: scheduling, block tables, the arrays of a step, sampling parameters, detokenisation and
events. `graphs` takes 0.1 ms to launch a step (one CUDA graph), `eager` 1.5 ms (some 300 kernels at 5 us).

    ahead     a step is launched when it is planned, while the device computes the last one (`execution.device_queue`)
    waiting   a step is launched when the last one's tokens are there, as before that

The figure is the device's share: 100 % means that it never waits. The last figures stand in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engine.steps import Steps
from transom_core.contract import SamplingParams
from transom_core.model_config.architecture import Architecture, LayerAttention
from transom_core.model_files.resolve import resolve_text_files
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.execution.device_queue import Fetch
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.sampling.fused_sampling import sampling_arrays
from transom_worker.telemetry.metrics import EngineMetrics

BATCHES, DEVICE_MS, LAUNCH_MS = (1, 64, 256), (3.0, 8.0, 10.0), {"graphs": 0.1, "eager": 1.5}
CONTEXT, VOCABULARY, HEADS = 1024, 1024, 2
FIRST_STEPS = 8  # not timed
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1 << 14, ignore_eos=True)
SPIN_S = 2e-4  # sleeping is not exact


@dataclass(frozen=True, slots=True)
class SimulatedFetch:
    """Ids that are on the host when their step has ended."""

    ends_s: float
    ids: list[int]

    def __call__(self) -> list[int]:
        """See `Fetch`."""
        _wait_until(self.ends_s)
        return self.ids

    def is_ready(self) -> bool:
        """See `Fetch`."""
        return time.perf_counter() >= self.ends_s


class SimulatedDevice:
    """Computes what is launched, one after the other. As a `DeviceQueue` it gives tokens when their step has ended."""

    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.step_s = self.launch_s = 0.0
        self.busy_s = 0.0  # in which it computed
        self._ends_s = 0.0

    def launch(self) -> None:
        """Launch a step; the host takes `launch_s`."""
        launched_s = time.perf_counter() + self.launch_s
        _wait_until(launched_s)
        self._ends_s = max(launched_s, self._ends_s) + self.step_s
        self.busy_s += self.step_s

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        """See `DeviceQueue.fetch`."""
        return SimulatedFetch(self._ends_s, ids_S.tolist())


class SimulatedModel:
    """A model whose forward pass is a launch."""

    weight_bytes = 1
    vocab = slice(0, VOCABULARY)

    def __init__(self, architecture: Architecture, device: SimulatedDevice) -> None:
        self.architecture, self._device = architecture, device
        self._logits_RV = torch.zeros(max(BATCHES), VOCABULARY)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Launch a step."""
        self._device.launch()
        return self._logits_RV[: len(batch.logit_rows)]

    hidden = logits = forward


class SimulatedExecutor(LocalExecutor):
    """One rank on the simulated device, whose host does what it does for a GPU."""

    device: SimulatedDevice

    def start(self) -> ExecutorInfo:
        """Start, and put the device where a GPU would be."""
        info = super().start()
        runner = self._runner
        assert runner is not None
        runner._queue = self.device
        runner._forward._replay = None
        runner._builder._kernels_read_tables = True  # else lists are made, which no GPU needs
        sampler, ids = runner._sampler, torch.zeros(max(BATCHES), dtype=torch.int64)

        def launch(logits_SV: torch.Tensor, seq_ids: Sequence[int], *_: object) -> torch.Tensor:
            sampling_arrays([sampler._states[seq_id] for seq_id in seq_ids])
            return ids[: len(seq_ids)]

        sampler.launch = launch  # type: ignore[method-assign,assignment]
        return info


def make_engine(device: SimulatedDevice) -> Engine:
    """An engine over a model of one full-attention group, with the demo model's tokenizer."""
    layer = LayerAttention(num_heads=HEADS, num_kv_heads=HEADS, head_size=16, window=None, sinks=0)
    architecture = Architecture(
        family="simulated", hidden_size=32, intermediate_size=32, vocab_size=VOCABULARY, max_position=1 << 16,
        rms_norm_eps=1e-5, tie_embeddings=False, attention_bias=False, mlp_bias=False, checkpoint_dtype="float32", layers=(layer,),
    )  # fmt: skip
    loaded: Any = LoadedModel(
        model=SimulatedModel(architecture, device), architecture=architecture, dtype="float32", device=torch.device("cpu"),
        eos_token_ids=(),
    )  # type: ignore[arg-type]  # fmt: skip
    config = Settings.parse(
        model="smollm2", device="cpu", dtype="float32", max_num_seqs=max(BATCHES), max_num_batched_tokens=8192,
        max_model_len=1 << 15, steps_in_flight=2, kv_cache_memory_bytes="512MiB", enable_prefix_caching=True,
    ).engine_config()  # fmt: skip
    executor = SimulatedExecutor(config, loaded)
    executor.device = device
    tokenizer = Tokenizer.load(resolve_text_files("smollm2"))
    return Engine(config, executor, tokenizer, EngineMetrics(model="simulated", worker="0"))


def device_share(engine: Engine, device: SimulatedDevice, batch: int, seconds: float) -> float:
    """The share of the time in which the device computed, while `batch` sequences decoded for some seconds."""
    device_step_s, device.step_s, steps = device.step_s, 0.0, Steps(engine)
    for i in range(batch):
        steps.add((3 + (i + j) % 900 for j in range(CONTEXT)), SAMPLED, salt="all")
    steps.until_started()
    device.step_s = device_step_s
    steps.tokens(FIRST_STEPS)
    begin_s, before_s = time.perf_counter(), device.busy_s
    while time.perf_counter() < begin_s + seconds:
        steps.step()
    share = (device.busy_s - before_s) / (time.perf_counter() - begin_s)
    steps.stop()
    return share


def _wait_until(moment_s: float) -> None:
    if (left_s := moment_s - time.perf_counter()) > SPIN_S:
        time.sleep(left_s - SPIN_S)
    while time.perf_counter() < moment_s:
        pass


def main(arguments: list[str] | None = None) -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    seconds = parser.parse_args(arguments).seconds
    devices = {name: SimulatedDevice(runs_ahead=name == "ahead") for name in ("ahead", "waiting")}
    engines = {name: make_engine(device) for name, device in devices.items()}
    print(f"{'batch':>5} {'device':>7} {'launch':>7} {'ahead':>7} {'waiting':>7}")
    for batch, step_ms, (launch, launch_ms) in itertools.product(BATCHES, DEVICE_MS, LAUNCH_MS.items()):
        shares = {}
        for name, device in devices.items():
            device.step_s, device.launch_s = step_ms / 1e3, launch_ms / 1e3
            shares[name] = device_share(engines[name], device, batch, seconds)
        print(f"{batch:5} {step_ms:4.0f} ms {launch:>7} {shares['ahead']:7.1%} {shares['waiting']:7.1%}", flush=True)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
