"""How much of its time a GPU computes while the engine decodes: the real engine over a simulated device.

    python -m benchmarks.gpu.host_gaps [--ranks 4] [--seconds 3]

All host work is real: scheduling, block tables, the arrays of a step, sampling parameters, detokenisation and events. `graphs`
takes 0.1 ms to launch a step (one CUDA graph), `eager` 1.5 ms (some 300 kernels at 5 us).

    ahead     a step is launched when it is planned, while the device computes the last one (`execution.device_queue`)
    waiting   a step is launched when the last one's tokens are there

The engine and rank 0 are real. With several ranks each is a process of its own, which needs a core. Other ranks have cores of their
own on a GPU machine and do there what rank 0 does; here they only receive the plans (`simulated_rank`). Collectives take no time.

The figure is the device's share: 100 % means that it never waits. The table is that of docs/gpu.md, which has the last figures:
ahead, and in brackets waiting, with graphs / eager.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.engine.steps import Steps
from benchmarks.gpu.simulated_device import SimulatedDevice, simulate, simulated_model
from benchmarks.gpu.simulated_rank import DEVICE_FILE, shared_numbers
from transom_core.contract import SamplingParams
from transom_core.model_files.resolve import resolve_text_files
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.execution.ranks import process_launcher
from transom_worker.execution.ranks.ranks_executor import RanksExecutor
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics

BATCHES, DEVICE_MS, LAUNCH_MS = (1, 64, 256), (3.0, 8.0), (0.1, 1.5)
CONTEXT = 1024
FIRST_STEPS = 8  # not timed
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1 << 14, ignore_eos=True)


class SimulatedExecutor(LocalExecutor):
    """One rank on the simulated device, in this process."""

    device: SimulatedDevice

    def start(self) -> ExecutorInfo:
        """Start, and put the device where a GPU would be."""
        info = super().start()
        assert self._runner is not None
        simulate(self._runner, self.device, max_rows=max(BATCHES))
        return info


def make_engine(device: SimulatedDevice, num_ranks: int) -> Engine:
    """An engine over the simulated model, with the demo model's tokenizer."""
    config = Settings.parse(
        model="smollm2", device="cpu", dtype="float32", max_num_seqs=max(BATCHES), max_num_batched_tokens=8192,
        max_model_len=1 << 15, steps_in_flight=2, kv_cache_memory_bytes="512MiB", enable_prefix_caching=True,
        tensor_parallel_size=num_ranks,
    ).engine_config()  # fmt: skip
    executor: Executor
    if num_ranks > 1:
        process_launcher.PROGRAM = (sys.executable, "-u", "-m", "benchmarks.gpu.simulated_rank")
        executor = RanksExecutor(config, process_launcher.RankProcesses)
    else:
        executor = SimulatedExecutor(config, simulated_model(device, num_ranks=1, max_rows=max(BATCHES)))
        executor.device = device
    tokenizer = Tokenizer.load(resolve_text_files("smollm2"))
    return Engine(config, executor, tokenizer, EngineMetrics(model="simulated", worker="0"))


def device_share(engine: Engine, device: SimulatedDevice, batch: int, seconds: float, *, is_ahead: bool) -> float:
    """The share of the time in which the device computed, while `batch` sequences decoded for some seconds."""
    device.numbers[3] = is_ahead
    device_step_s, steps = device.numbers[0], Steps(engine)
    device.numbers[0] = 0.0
    for i in range(batch):
        steps.add((3 + (i + j) % 900 for j in range(CONTEXT)), SAMPLED, salt="all")
    steps.until_started()
    device.numbers[0] = device_step_s
    steps.tokens(FIRST_STEPS)
    begin_s, busy_s = time.perf_counter(), float(device.numbers[2])
    while time.perf_counter() < begin_s + seconds:
        steps.step()
    share = (float(device.numbers[2]) - busy_s) / (time.perf_counter() - begin_s)
    steps.stop()
    return share


def main(arguments: list[str] | None = None) -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[DEVICE_FILE] = str(Path(folder) / "device")
        Path(os.environ[DEVICE_FILE]).write_bytes(bytes(4 * 8))
        device = SimulatedDevice(shared_numbers())
        device.numbers[3] = True
        engine = make_engine(device, options.ranks)
        try:
            print_table(engine, device, options.seconds)
        finally:
            engine.shutdown()


def print_table(engine: Engine, device: SimulatedDevice, seconds: float) -> None:
    """Measure every batch, step and launch, and print a row for each batch."""
    print("| sequences | " + " | ".join(f"{step_ms:.0f} ms" for step_ms in DEVICE_MS) + " |")
    for batch in BATCHES:
        cells = []
        for step_ms in DEVICE_MS:
            shares = []
            for launch_ms in LAUNCH_MS:
                device.numbers[:2] = step_ms / 1e3, launch_ms / 1e3
                waiting, ahead = (device_share(engine, device, batch, seconds, is_ahead=one) for one in (False, True))
                shares.append(f"{100 * ahead:.0f} ({100 * waiting:.0f})")
            cells.append(" / ".join(shares))
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
