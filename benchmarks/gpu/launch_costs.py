"""How long does the host take to launch one layer of a decoding step? Without a GPU: a fake driver does nothing at each launch.

    python -m benchmarks.gpu.launch_costs [--batch 64] [--context 1000] [--repeats 400]

Prints, for a layer of Llama 3 8B and for both kinds of layers of gpt-oss-20b, each launch with the microseconds of the host from
the launch before it: Transom's and Triton's Python, and torch's allocations. A product of torch counts as the allocation of its
result, and the driver's own time is not in it; on a GPU they add some 8 us a product and 4 us a launch. Kernels are compiled
for sm_90. The machine's noise is in the figures: compare two commits in one go, in turns. The last figures are in docs/gpu.md.
"""

import argparse
import ctypes
import os
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported

import torch
from triton.runtime import driver

from benchmarks.gpu.geometries import RandomWeights, config_json, geometry
from transom_core.model_config.architecture import read_architecture
from transom_kernels import launch
from transom_kernels.absent_device import AbsentDriver
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.residual import Residual
from transom_worker.models.registry import build_model

BLOCK_SIZE = 16
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
NAMES = {"llama": "Llama 3 8B", "gpt_oss": "gpt-oss-20b"}


@dataclass(slots=True)
class Trace:
    """When what was launched."""

    names: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def note(self, name: str) -> None:
        """A launch, now."""
        self.names.append(name)
        self.times_s.append(time.perf_counter())


trace = Trace()


class FakeLauncher:
    """Stands in for the compiled stub that hands a launch to CUDA."""

    launch_cooperative_grid = launch_pdl = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        """Note the launch."""
        trace.note(self._name)


class FakeDriver(AbsentDriver):
    """Triton's driver of one device of compute capability 9.0, whose launches are noted."""

    launcher_cls = FakeLauncher


class UnreadWeights(RandomWeights):
    """Memory that is neither written nor read."""

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch's product costs here: its result's memory."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    trace.note("product")
    return out


def layers_of(name: str, *, batch: int, context: int) -> dict[str, Any]:
    """The model's kinds of layers: for each a function that runs it once."""
    config = geometry(name)
    config.num_hidden_layers, config.vocab_size = 2, 1000  # one of each kind, and a small embedding
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    architecture = read_architecture(config_json(config))
    model: Any = build_model(architecture, UnreadWeights(torch.device("cpu")), dtype=torch.bfloat16, device="cpu")
    found = {}
    for index in range(2 if name == "gpt_oss" else 1):
        attention, rope = architecture.layers[index], architecture.ropes[index]
        pages = torch.empty((batch, 2, attention.num_kv_heads, BLOCK_SIZE, attention.head_size), dtype=torch.bfloat16)
        cache = LayerCache(pages[:, 0].transpose(1, 2), pages[:, 1].transpose(1, 2))
        group = decoding(batch, context)
        tables = model._rotary[rope](torch.full((batch,), context), None)
        x = torch.empty((batch, architecture.hidden_size), dtype=torch.bfloat16)
        layer = model._layers[index]

        def run(layer: Any = layer, x: Any = x, rest: tuple[Any, ...] = (tables, cache, group)) -> None:
            residual = Residual(x)
            residual.add(x)  # as between layers: the first norm adds what the layer before has computed
            layer(residual, *rest)

        window = f", window of {attention.window}" if attention.window else ""
        found[f"{NAMES[name]}{window}"] = run
    return found


def decoding(batch: int, context: int) -> PagedBatch:
    """A decoding step: one new token for each sequence."""
    return PagedBatch(
        block_size=BLOCK_SIZE,
        num_sink_blocks=0,
        block_table=torch.zeros((batch, -(-context // BLOCK_SIZE) + 1), dtype=torch.int32),
        first_block=torch.zeros(batch, dtype=torch.int32),
        attend_from=torch.zeros(batch, dtype=torch.int32),
        slots=torch.zeros(batch, dtype=torch.int64),
        query_offset=torch.arange(batch + 1, dtype=torch.int32),
        start=torch.full((batch,), context, dtype=torch.int32),
        block_table_host=[],
        first_block_host=[0] * batch,
        attend_from_host=[0] * batch,
        start_host=[context] * batch,
        count_host=[1] * batch,
    )


def measure(run: Any, repeats: int) -> list[tuple[str, float]]:
    """Each launch of a layer, and the median of its microseconds since the one before; last what follows the last launch."""
    for _ in range(10):
        run()
    rows = []
    for _ in range(repeats):
        trace.names, trace.times_s = [], []
        begin_s = time.perf_counter()
        run()
        trace.note("after the last")
        times_s = [begin_s, *trace.times_s]
        rows.append([1e6 * (end_s - start_s) for start_s, end_s in pairwise(times_s)])
    return list(zip(trace.names, map(statistics.median, zip(*rows, strict=True)), strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # freed memory is kept, as on CUDA
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)
    driver.set_active(FakeDriver((9, 0)))
    launch._chosen = "interpreted"  # for CPU tensors, but with the kernels compiled
    with patch("torch.nn.functional.linear", product), torch.inference_mode():
        for name in NAMES:
            for layer, run in layers_of(name, batch=options.batch, context=options.context).items():
                launches = measure(run, options.repeats)
                print(f"{layer}: {sum(us for _, us in launches):.0f} us a layer")
                for launched, us in launches:
                    print(f"    {launched:20s}{us:7.1f}")


if __name__ == "__main__":
    main()
