"""Decode steps as captured graphs: the host writes a step's numbers, copies them once and replays, launching nothing else.

Captured at start for every size, and only trusted after a replay over other inputs has given what the same forward pass gives.
Whatever fails there turns graphs off, and steps run as they would without.

Legend: B sequences of a size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from transom_kernels.paged_attention.work_items import WorkPlan
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.graphs.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.graphs.graph_capture import CaptureDevice, Replayable
from transom_worker.execution.graphs.static_batch import (
    GroupLaunchKey,
    StaticBatch,
    bytes_of,
    plan_work_by_key,
    requirements_of,
)
from transom_worker.models.model import Model

# Of the largest logit. Equal bits are expected, but cuBLAS promises them only on one stream and with one workspace, and graphs are
# captured on a stream of their own. A number of another step shows far above this.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

logger = logging.getLogger("transom.worker")


@dataclass(slots=True)
class _Captured:
    batch: StaticBatch
    graph: Replayable


class DecodeGraphs:
    """Graphs of one model's decode steps, by size."""

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        sizes: DecodeSizes,
        launch_keys: Sequence[GroupLaunchKey],
        device: CaptureDevice,
    ) -> None:
        """`launch_keys` are those of all layers: see `parts.launch_keys_of`."""
        self.builder, self.sizes = builder, sizes
        self._model, self._launch_keys, self._device = model, tuple(launch_keys), device
        self._tolerance = TOLERANCES[builder.caches[0].k.dtype]
        num_bytes = max(bytes_of(size, sizes, launch_keys, builder) for size in sizes.all)
        self._host = device.host_buffer(num_bytes)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=builder.device)
        num_columns = model.vocab.stop - model.vocab.start
        # graphs share it: results in a memory of their own would add up over all sizes
        self._logits_BV = torch.zeros(sizes.num_seqs[-1], num_columns, dtype=torch.float32, device=builder.device)
        self._captured: dict[DecodeSize, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """Those that steps may replay."""
        return len(self._captured)

    def prepared(self, arrays: StepArrays) -> Callable[[], torch.Tensor] | None:
        """Brings a decode step's numbers to the device; what then replays it and returns logits [sequences, V], good until the
        next step. None where no graph is for it, and nothing has been done."""
        if not arrays.only_decodes:
            return None
        works = plan_work_by_key(arrays, self._launch_keys)
        size = self.sizes.smallest_for(requirements_of(arrays, works))
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return None
        self._load(captured.batch, arrays, works)
        return partial(self._replayed, captured.graph, len(arrays.token_ids))

    def capture(self, size: DecodeSize, first: StepArrays, second: StepArrays) -> None:
        """Capture one size over the first step, and check it over the second. Both are run; they write into the cache.

        Raises:
            GraphMismatch: a replay over the second step gives something else than its forward pass.  Any other error: the device
            cannot capture.
        """
        batch = StaticBatch(size, self.sizes, self._launch_keys, self.builder, host=self._host, device=self._inputs)
        self._load(batch, first, plan_work_by_key(first, self._launch_keys))

        def run() -> None:
            self._logits_BV[: size.num_seqs].copy_(self._model.forward(batch.forward_batch()))

        graph = self._device.capture(run)
        self._load(batch, second, plan_work_by_key(second, self._launch_keys))
        graph.replay()
        self._compare(size, self._logits_BV[: size.num_seqs], self._model.forward(batch.forward_batch()))
        self._captured[size] = _Captured(batch, graph)

    def _replayed(self, graph: Replayable, num_seqs: int) -> torch.Tensor:
        graph.replay()
        return self._logits_BV[:num_seqs]

    def _load(self, batch: StaticBatch, arrays: StepArrays, works: Sequence[WorkPlan]) -> None:
        self._device.wait_uploaded()
        batch.write(arrays, works)
        self._device.upload(self._host[: batch.num_bytes], self._inputs[: batch.num_bytes])

    def _compare(self, size: DecodeSize, replayed_BV: torch.Tensor, logits_BV: torch.Tensor) -> None:
        if torch.equal(replayed_BV, logits_BV):
            return
        # of what is finite: infinities must be the same ones
        most = float(logits_BV.abs().nan_to_num(posinf=0.0).max())
        differs = float((replayed_BV - logits_BV).abs().nan_to_num(nan=most).max())
        if not torch.allclose(replayed_BV, logits_BV, rtol=0.0, atol=self._tolerance * most, equal_nan=True):
            raise GraphMismatch(
                f"{size}: logits of up to {most:.4g} differ by up to {differs:.4g} from the forward pass"
            )
        logger.info("The graph of %s differs by up to %.3g in logits of up to %.3g.", size, differs, most)


class GraphMismatch(Exception):
    """A graph that does not compute what its forward pass does; never leaves the start-up."""
