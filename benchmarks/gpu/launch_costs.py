"""How long does the host take to launch one layer of a decoding step? Without a GPU: a fake driver does nothing at each launch.

    python -m benchmarks.gpu.launch_costs

Prints, for a layer of Llama 3 8B and for both kinds of layers of gpt-oss-20b, each launch with the microseconds of the host from
the launch before it: Transom's and Triton's Python, and torch's allocations. A product of torch counts as the allocation of its
result, and the driver's own time is not in it; on a GPU they add some 8 us a product and 4 us a launch. Kernels are compiled
for sm_90. The machine's noise is in the figures: compare two commits in one go, in turns. The last figures are in docs/gpu.md.
"""

import ctypes
import os
import statistics
import time
from itertools import pairwise
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported

import torch
from triton.runtime import driver

from benchmarks.engine.kernel_cases.paged import BLOCK, paged_batch
from benchmarks.gpu.geometries import RandomWeights, config_json, geometry
from transom_core.model_config.architecture import read_architecture
from transom_kernels import launch
from transom_kernels.absent_device import AbsentDriver
from transom_worker.models.decoder import DecoderLayer
from transom_worker.models.layers.attention import LayerContext
from transom_worker.models.layers.forward_batch import LayerCache
from transom_worker.models.layers.residual import Residual
from transom_worker.models.registry import build_model

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
BATCH, CONTEXT, REPEATS = 64, 1000, 400
NAMES = {"llama": "Llama 3 8B", "gpt_oss": "gpt-oss-20b"}


launches: list[tuple[str, float]] = []  # what was launched, and when


class FakeLauncher:
    """Stands in for the compiled stub that hands a launch to CUDA."""

    launch_cooperative_grid = launch_pdl = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        """Note the launch."""
        launches.append((self._name, time.perf_counter()))


class UnreadWeights(RandomWeights):
    """Memory that is neither written nor read."""

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch's product costs here: its result's memory."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    launches.append(("product", time.perf_counter()))
    return out


def layers_of(name: str) -> dict[str, Any]:
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
        pages = torch.empty((BATCH, 2, attention.num_kv_heads, BLOCK, attention.head_size), dtype=torch.bfloat16)
        cache = LayerCache(pages[:, 0].transpose(1, 2), pages[:, 1].transpose(1, 2))
        table = [0] * (CONTEXT // BLOCK + 1)
        group = paged_batch([table] * BATCH, [0] * BATCH, [CONTEXT] * BATCH, [1] * BATCH, torch.device("cpu"))
        tables = model._rotary[rope](torch.full((BATCH,), CONTEXT), None)
        x = torch.empty((BATCH, architecture.hidden_size), dtype=torch.bfloat16)
        context = LayerContext(tables, cache, group, None)

        def run(layer: DecoderLayer = model._layers[index], x: Any = x, context: LayerContext = context) -> None:
            residual = Residual(x)
            residual.add(x)  # as between layers: the first norm adds what the layer before has computed
            layer(residual, context)

        window = f", window of {attention.window}" if attention.window else ""
        found[f"{NAMES[name]}{window}"] = run
    return found


def measure(run: Any) -> list[tuple[str, float]]:
    """Each launch of a layer, and the median of its microseconds since the one before; last what follows the last launch."""
    for _ in range(10):
        run()
    rows = []
    for _ in range(REPEATS):
        launches.clear()
        begin_s = time.perf_counter()
        run()
        launches.append(("after the last", time.perf_counter()))
        times_s = [begin_s, *(launched_s for _, launched_s in launches)]
        rows.append([1e6 * (end_s - start_s) for start_s, end_s in pairwise(times_s)])
    return list(zip([name for name, _ in launches], map(statistics.median, zip(*rows, strict=True)), strict=True))


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # freed memory is kept, as on CUDA
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)
    AbsentDriver.launcher_cls = FakeLauncher
    driver.set_active(AbsentDriver((9, 0)))
    launch._chosen = "interpreted"  # for CPU tensors, but with the kernels compiled
    with patch("torch.nn.functional.linear", product), torch.inference_mode():
        for name in NAMES:
            for layer, run in layers_of(name).items():
                costs = measure(run)
                print(f"{layer}: {sum(us for _, us in costs):.0f} us a layer")
                for launched, us in costs:
                    print(f"    {launched:20s}{us:7.1f}")


if __name__ == "__main__":
    main()
